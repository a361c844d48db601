"""Scoring of a batch divided among processes: each scores its share of groups, then rewards are exchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jetrl_jax.devices import processes
from jetrl_jax.rewards.functions import RewardFunctions, RewardResult
from jetrl_jax.tasks.base import Example


def score(
    rewards: RewardFunctions,
    group: int,
    prompts: Sequence[str],
    completions: Sequence[str],
    examples: Sequence[Example],
    finish_reasons: Sequence[str],
    completion_ids: Sequence[Any],
    thought_opened: Sequence[bool],
) -> RewardResult:
    """The `rewards` of N completions, prompt-major in groups of `group`.

    Every process passes the same arguments and gets the whole result.  One process scores a whole group.

    Raises:
      UserError, ValueError: as `RewardFunctions`.
    """
    if processes.count() == 1:
        return rewards(prompts, completions, examples, finish_reasons, completion_ids, thought_opened)
    share = np.array_split(np.arange(len(completions)).reshape(-1, group), processes.count())[
        processes.index()
    ].reshape(-1)
    columns = (prompts, completions, examples, finish_reasons, completion_ids, thought_opened)
    result = rewards(*([column[i] for i in share] for column in columns))
    texts = json.dumps({"failures": result.failures, "messages": result.messages})
    own = {"total": result.total, "texts": np.array(texts)} | {
        f"part {name}": values for name, values in result.parts.items()
    }
    everywhere = processes.exchange(own)
    said = [json.loads(str(given["texts"])) for given in everywhere]
    return RewardResult(
        np.concatenate([given["total"] for given in everywhere]),
        {name: np.concatenate([given[f"part {name}"] for given in everywhere]) for name in result.parts},
        {
            name: {kind: sum(one["failures"][name][kind] for one in said) for kind in kinds}
            for name, kinds in result.failures.items()
        },
        [message for one in said for message in one["messages"]],
    )
