"""The fingerprint of a task's data: any change of any example is seen and named; the same data is the same
everywhere.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.record.resume_rules import compare_data_for_resume
from jetrl_jax.tasks.base import Example, LazyExamples
from jetrl_jax.tasks.fingerprint import SPREAD, data_fingerprint
from jetrl_jax.tasks.records import ListTask

COUNT = 400
CHANGES = {
    "prompts": lambda e: dataclasses.replace(e, prompt=e.prompt + " "),
    "answers": lambda e: dataclasses.replace(e, answer=e.answer + "0"),
    "solutions": lambda e: dataclasses.replace(e, solution=""),
    "metadata": lambda e: dataclasses.replace(e, metadata=e.metadata | {"level": 2}),
}


def examples(count: int) -> list[Example]:
    return [
        Example(f"p{i}", str(i), f"because {i}", i, {"level": 1, "tags": {"a", "b", "c"}})
        for i in range(count)
    ]


def fingerprint(train: Any, verifier: str = "exact_match") -> dict[str, Any]:
    return {"tokenizer": "t", "data": data_fingerprint(ListTask("t", train, examples(8), verifier))}


@pytest.mark.parametrize("part", list(CHANGES))
def test_a_change_of_any_example_of_a_list_is_refused_by_the_name_of_its_part(part):
    saved, rng = fingerprint(examples(COUNT)), random.Random(0)
    for index in [0, COUNT - 1, *(rng.randrange(COUNT) for _ in range(20))]:
        changed = examples(COUNT)
        changed[index] = CHANGES[part](changed[index])
        with pytest.raises(UserError, match="the data is not that of the run") as error:
            compare_data_for_resume(saved, fingerprint(changed))
        assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]] == [
            f"data.train.{part}"
        ]
    compare_data_for_resume(saved, fingerprint(tuple(examples(COUNT))))


def test_order_size_verifier_and_tokenizer_are_part_of_it():
    saved = fingerprint(examples(COUNT))
    for changed, name in (
        (fingerprint(examples(COUNT)[::-1]), "data.train.prompts: saved"),
        (fingerprint(examples(COUNT - 1)), f"data.train.examples: saved {COUNT}, now {COUNT - 1}"),
        (fingerprint(examples(COUNT), "boxed"), "data.verifier: saved 'exact_match', now 'boxed'"),
        (saved | {"tokenizer": "u"}, "tokenizer: saved 't', now 'u'"),
    ):
        with pytest.raises(UserError) as error:
            compare_data_for_resume(saved, changed)
        assert name in str(error.value)


def test_a_generated_split_is_sampled_and_a_users_own_sequence_is_not():
    made = []

    def make(index: int) -> Example:
        made.append(index)
        return examples(1)[0]

    fingerprint(LazyExamples(10**9, make))
    assert len(set(made)) == SPREAD and {0, 10**9 - 1} <= set(made)

    class Sequence:
        def __init__(self, rows: list[Example]):
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Example:
            return self.rows[index]

    assert fingerprint(Sequence(examples(COUNT))) == fingerprint(examples(COUNT))


VALUES = [
    None, True, 1, 10**5000, 1.0, "1", b"1", [1], [1, [2]], [[1], 2], {"a": 1}, {"a": [1]}, {1, 2}, "", [], {}, "a\ud800", float("nan"),
    -0.0, 0.0, Decimal("1"), datetime.date(2020, 1, 2), np.float32(1), np.float64(1), np.arange(3), np.arange(3.0),
    np.array([1, "a"], object), ["ab", "c"], ["a", "bc"], {"a": "b", "c": "d"}, {"a": "bc", "": "d"},
]  # fmt: skip


def test_values_of_any_type_are_told_apart():
    seen = [fingerprint([Example("p", value, "", 0, {})])["data"]["train"]["answers"] for value in VALUES]
    assert len(set(seen)) == len(VALUES)


def test_the_same_data_has_the_same_fingerprint_in_another_process():
    """Sets and objects that show their address have another order or text there."""
    program = (
        "from jetrl_jax.tasks.base import Example; from jetrl_jax.tasks.records import ListTask\n"
        "from jetrl_jax.tasks.fingerprint import data_fingerprint\n"
        "rows = [Example('p', {'x', 'y', 'zz', 'w'}, 's', 0, {'b': object(), 'a': {3: 'x', 1: ('y',)}})]\n"
        "found = data_fingerprint(ListTask('t', rows, rows))\n"
    )
    here: dict[str, Any] = {}
    exec(program, here)
    environment = os.environ | {"PYTHONHASHSEED": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program + "print(found)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout == f"{here['found']}\n"
