"""GSM8K on the real files: every reference scores, nothing near it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.tasks import gsm8k
from jetrl_jax.tasks.registry import build_task
from tests.sections import task_section


@pytest.fixture(scope="module")
def task():
    folder = gsm8k.directory(None)
    if not (folder / "test.jsonl").is_file():
        pytest.skip(f"GSM8K's files are not there: set GSM8K_DIR (looked in {folder})")
    return build_task(task_section(kind="gsm8k"), 0)


@pytest.fixture(scope="module")
def items(task):
    """(example, the answer as an integer), read from the file without our code."""
    rows = [
        json.loads(line) for line in (gsm8k.directory(None) / "test.jsonl").read_text("utf-8").splitlines()
    ]
    assert [e.prompt for e in task.eval] == [row["question"] for row in rows]
    return [
        (e, int(row["answer"].split("####")[1].strip().replace(",", "")))
        for e, row in zip(task.eval, rows, strict=True)
    ]


def swapped(value: int) -> list[int]:
    """The numbers made by swapping two neighbouring digits, without those that stay the same."""
    digits = str(abs(value))
    swaps = {digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :] for i in range(len(digits) - 1)}
    return [s for s in ((-1 if value < 0 else 1) * int(d) for d in swaps) if s != value]


def test_gsm8k_has_its_1319_and_7473_items(task):
    assert (len(task.eval), len(task.train)) == (1319, 7473)
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.eval}
    assert not task.notes and not task.separate_process


def test_gsm8k_reference_scores_one_also_with_text_after_it(task, items):
    for example, value in items:
        reference = example.solution
        for text in (
            reference, reference + "\n", reference + ".", reference + " dollars",
            reference + "\n\nLet me know if you have 3 more questions.",
            reference + " That is 100% certain, unlike 7.", reference + "\nQuestion: what is 2 + " "2?\nAnswer: 4", reference + "<|im_end|>",
            f"#### {value}", f"#### {value:,}", f"#### ${value:,}.00", f"#### {value}.0",
        ):  # fmt: skip
            assert task.verify(text, example) == 1.0, text


def test_gsm8k_wrong_answers_score_zero(task, items):
    tried = 0
    for example, value in items:
        working = example.solution.split("####")[0]
        wrong = {value + 1, value - 1, value * 10, value + 1000, *swapped(value)} | (
            {-value} if value else set()
        )
        for number in wrong - {value}:
            tried += 1
            assert task.verify(f"{working}#### {number}", example) == 0.0
            assert task.verify(f"{working}#### {number:,}", example) == 0.0
    assert tried > 1319 * 5


def test_gsm8k_answer_only_inside_the_working_scores_zero(task, items):
    for example, value in items:
        working = example.solution.split("####")[0]
        for text in (
            working,
            f"{working}\nThe answer is {value}.",
            f"{working}#### ",
            f"{working}####\n{value}",
            str(value),
            f"<think>{example.solution}</think>",
            "",
        ):
            assert task.verify(text, example) == 0.0, text


@pytest.mark.parametrize(
    ("extraction", "text"), [("boxed", "so \\boxed{{{}}}."), ("last_number", "so it is {} dollars.")]
)
def test_gsm8k_other_extractions(task, items, extraction, text):
    other = build_task(task_section(kind="gsm8k", options={"extraction": extraction}), 0)
    for example, value in items[:200]:
        assert other.verify(text.format(value), example) == 1.0
        assert other.verify(text.format(value + 1), example) == 0.0
        assert task.verify(text.format(value), example) == 0.0


def write(folder: Path, **files: list) -> Path:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text(
            "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), "utf-8"
        )
    return folder


GOOD = {"question": "q?", "answer": "1+1=2\n#### 2"}


def test_gsm8k_directory_comes_from_path_then_environment(tmp_path, monkeypatch):
    write(tmp_path, train=[GOOD], test=[{"question": "other", "answer": "#### 1,000"}])
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    assert build_task(task_section(kind="gsm8k"), 0).eval[0].answer == "1000"
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path / "no"))
    assert len(build_task(task_section(kind="gsm8k", path=str(tmp_path)), 0).train) == 1
    with pytest.raises(UserError, match=r"no train.jsonl and no test.jsonl in .*Set task.path or GSM8K_DIR"):
        build_task(task_section(kind="gsm8k"), 0)


def test_gsm8k_lists_broken_lines(tmp_path):
    write(tmp_path, train=[GOOD, {"question": "q", "answer": "two"}, "{", "[]"], test=[{"answer": "#### 2"}])
    with pytest.raises(UserError) as error:
        build_task(task_section(kind="gsm8k", path=str(tmp_path)), 0)
    text = str(error.value)
    assert "4 broken records" in text
    for line in (
        "train.jsonl:2: no '#### number'",
        "train.jsonl:3: not JSON",
        "train.jsonl:4: not an object",
        "test.jsonl:1: no question",
    ):
        assert line in text


def test_gsm8k_drops_training_items_that_are_held_out(tmp_path):
    write(tmp_path, train=[GOOD, {"question": "new", "answer": "#### 3"}], test=[GOOD])
    task = build_task(task_section(kind="gsm8k", path=str(tmp_path)), 0)
    assert [e.prompt for e in task.train] == ["new"]
    assert task.notes == ("1 of 2 training records dropped: their prompts are held out",)
    with pytest.raises(UserError, match=r"got task.options.extraction='last'"):
        build_task(task_section(kind="gsm8k", path=str(tmp_path), options={"extraction": "last"}), 0)
