"""What may differ between a run and its resume: little, and everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.training.run_directory import flatten

# A resumed run may change these; `compare_for_resume` refuses every other difference.
MAY_CHANGE = (
    "run.steps",
    "run.directory",
    "run.samples_per_step",
    "run.max_skipped_steps",
    "run.tensorboard",
    "run.wandb_project",
    "run.profile_steps",
    "eval.every_steps",
    "checkpoint.",
    "sharding.",
    "distributed.",
    "batch.remat",
)


def compare_for_resume(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to resume a run with a config that would make it another run.

    ``saved`` and ``current``: the resolved configs as nested dicts.  Raises `UserError` that lists every field
    that differs, with both values, except those of `MAY_CHANGE`.  ``run.steps`` counts as different too when
    the learning rate follows it (``optimizer.schedule`` other than constant).
    """
    before, after = flatten(saved), flatten(current)
    absent = "(absent)"
    differing = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, absent), after.get(name, absent)
        if _same(old, new) or (name.startswith(MAY_CHANGE) and not (name == "run.steps" and _stretches(after))):
            continue
        why = "; the learning-rate schedule ends there" if name == "run.steps" else ""
        differing.append(f"  {name}: saved {old!r}, now {new!r}{why}")
    if differing:
        raise UserError(
            "compare_for_resume: the config is not that of the run:\n" + "\n".join(differing) + "\n"
            "Give these fields their saved values, or start a new run in another run.directory."
        )


def _stretches(config: Mapping[str, Any]) -> bool:
    return config.get("optimizer.schedule", "constant") != "constant"


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, list | tuple | Mapping) or isinstance(new, list | tuple | Mapping):  # only empty ones reach here
        return not old and not new and isinstance(old, Mapping) == isinstance(new, Mapping)
    return bool(old == new) and isinstance(old, bool) == isinstance(new, bool)
