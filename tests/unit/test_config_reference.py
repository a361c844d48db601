"""The reference of all fields: current, and one sentence per field with its meaning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_jax.commands.config import reference
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import all_fields, look_up, split

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {path: next(iter(found.values())) for path, _, found in all_fields()}


def test_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference(), "docs/config.md is not current: python -m jetrl_jax config > docs/config.md"


def test_reference_is_printed_by_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jetrl_jax", "config"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == reference() and not done.stderr


def test_reference_lists_every_field_once() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \|", reference(), re.MULTILINE)
    assert listed == list(FIELDS)
    assert not re.search(r"\| *\|", reference().replace("|---|---|---|---|", ""))


@pytest.mark.parametrize("path", FIELDS)
def test_field_has_a_sentence_with_its_unit_and_what_null_means(path: str) -> None:
    kind, text = FIELDS[path], FIELDS[path].meaning
    assert re.match(r"[A-Z]|\w+:|\w+ and \w+|bf16", text) and text.endswith("."), text
    assert len(text) > 15
    if path.endswith("_tokens"):
        assert "tokens" in text.lower(), text
    if path.endswith("_s"):
        assert "seconds" in text, text
    if kind.optional:
        assert re.search(r"\bnull\b", text) or path in ("task.name", "task.path"), text
    if kind.type == "bool":
        assert text.startswith("Whether") or "false" in text, text


def test_sections_say_what_they_are() -> None:
    for name in RunConfig.model_fields:
        found = look_up((name,))
        assert found is not None and found.meaning.endswith("."), name


def test_types_are_told_in_words() -> None:
    expected = {
        "seed": "a whole number, at least 0",
        "model.path": "text, not empty",
        "model.hidden_size": "a whole number, at least 1",
        "optimizer.b1": "a number, at least 0 and less than 1",
        "warm_start.noise": "a number, at least 0 and at most 1",
        "algorithm.clip_low": "a number, greater than 0",
        "algorithm.dual_clip": "a number, greater than 1, or null",
        "rollout.engine.sleep": "true or false, or null",
        "rollout.engine.kind": "one of jax, vllm, vllm_server, vllm_external",
        "algorithm.name": "one of grpo, rloo, reinforce_pp, dapo, dr_grpo, gspo, cispo",
        "batch.row_tokens": "a whole number, at least 1, or null",
        "task.options": "a section of free names and values",
        "rewards": "a list of sections, not empty",
        "run": "a section of fields",
    }
    places = {path: look_up(split(path)) for path in expected}
    assert {path: place.words for path, place in places.items() if place is not None} == expected
