"""The few settings that may differ between a run and its resume; every other difference is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.record.run_directory import flatten

# A resumed run may change these; `compare_for_resume` refuses every other difference.
MAY_CHANGE = (
    "run.steps",
    "run.directory",
    "run.samples_per_step",
    "run.max_skipped_steps",
    "run.max_steps_without_signal",
    "run.tensorboard",
    "run.wandb_project",
    "run.profile_steps",
    "eval.every_steps",
    "checkpoint.",
    "sharding.",
    "distributed.",
    "batch.remat",
    "rollout.turns",  # the same tokens and bits
)


def compare_for_resume(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises `UserError` if a config would make a resumed run a different run.

    ``saved`` and ``current``: the resolved configs as nested dicts.  The error lists every field that
    differs, with both values, except those in `MAY_CHANGE`.  ``run.steps`` must also be equal if the learning
    rate depends on it (``optimizer.schedule`` other than constant).
    """
    stretches = _stretches(flatten(current))
    differing = []
    for name, sentence in _differences(saved, current).items():
        if name.startswith(MAY_CHANGE) and not (name == "run.steps" and stretches):
            continue
        differing.append(
            sentence + ("; the learning-rate schedule ends there" if name == "run.steps" else "")
        )
    if differing:
        raise UserError(
            "compare_for_resume: the config is not that of the run:\n" + "\n".join(differing) + "\n"
            "Give these fields their saved values, or start a new run in another run.directory."
        )


def compare_data_for_resume(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises `UserError` if a run is resumed on other data or with another tokenizer.

    ``saved``: a checkpoint's metadata; ``current``: "tokenizer" (its fingerprint) and "data"
    (`jetrl_jax.tasks.fingerprint`).  The error names every part that differs, with both sizes, names or
    hashes.
    """
    differing = _differences({name: saved.get(name) for name in current}, current)
    if differing:
        raise UserError(
            "compare_data_for_resume: the data is not that of the run:\n"
            + "\n".join(differing.values())
            + "\n"
            "Give the run the data and tokenizer that it began with, or start a new run in another "
            "run.directory."
        )


def compare_implementations_for_resume(saved: Mapping[str, Any], current: Mapping[str, str]) -> None:
    """Raises `UserError` if a run is resumed where other implementations serve its operations, such as on a
    GPU after a CPU: the rest of the run would have other bits.

    ``saved``: a checkpoint's metadata, in an older one without implementations; ``current``: the name of each
    operation's implementation.
    """
    before = saved.get("implementations")
    differing = _differences(before, current) if before is not None else {}
    if differing:
        raise UserError(
            "compare_implementations_for_resume: other implementations than the run began with:\n"
            + "\n".join(differing.values())
            + "\nResume on the kind of device and with the JAX of the run's start (environment.json), or "
            "start a new run from its exported checkpoint (model.path)."
        )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Dotted path -> a line with both values, for every field that differs."""
    before, after, absent = flatten(saved), flatten(current), "(absent)"
    pairs = {name: (before.get(name, absent), after.get(name, absent)) for name in sorted({*before, *after})}
    return {
        name: f"  {name}: saved {old!r}, now {new!r}"
        for name, (old, new) in pairs.items()
        if not _same(old, new)
    }


def _stretches(config: Mapping[str, Any]) -> bool:
    return config.get("optimizer.schedule", "constant") != "constant"


def _same(old: Any, new: Any) -> bool:
    # only empty containers reach this line
    if isinstance(old, list | tuple | Mapping) or isinstance(new, list | tuple | Mapping):
        return not old and not new and isinstance(old, Mapping) == isinstance(new, Mapping)
    return bool(old == new) and isinstance(old, bool) == isinstance(new, bool)
