"""The draft head of a run: its trainer, which starts from the policy's first head."""

from __future__ import annotations

from collections.abc import Callable

from jetrl_jax.record.console import print_warning
from jetrl_jax.runs.policy import Policy, first_head
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import PolicyPrograms


def build_drafter(
    policy: Policy, programs: PolicyPrograms, warn: Callable[[str], None] = print_warning
) -> DraftTrainer | None:
    """The trainer of the draft head that the policy's config asks for; None without one.

    Raises:
      UserError: as `first_head`.
    """
    section = policy.config.draft_head
    if section is None:
        return None
    return DraftTrainer(first_head(policy), programs, section.learning_rate, section.lengths, warn)
