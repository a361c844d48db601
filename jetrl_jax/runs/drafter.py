"""The draft head of a run: new or read from a directory, its trainer, and its draft in the engine."""

from __future__ import annotations

import numpy as np
from flax import nnx

from bridge.hf.draft import read_draft_head
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import UserError
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.runs.policy import Policy
from jetrl_jax.training.draft import DraftTrainer
from jetrl_jax.training.programs import PolicyPrograms


def build_drafter(config: RunConfig, policy: Policy, programs: PolicyPrograms) -> DraftTrainer | None:
    """The trainer of the config's draft head; None without one.

    Raises:
      UserError: a policy of too few layers, or a head of another policy.
    """
    section, model = config.draft_head, policy.model
    if section is None:
        return None
    if section.head_path is not None:
        head = read_draft_head(section.head_path, model.config, model.numerics)
    else:
        try:
            vocabulary = np.arange(model.config.vocab_size)
            head = DraftHead(model.config, model.numerics, vocabulary, rngs=nnx.Rngs(config.seed))
        except ValueError as error:
            raise UserError(f"rollout.engine.speculation.kind: {error}") from None
    return DraftTrainer(head, programs, section.learning_rate, section.lengths)
