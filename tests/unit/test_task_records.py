"""Tasks from records: files, Hugging Face datasets, a user's function; broken input named by file and line."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from jetrl_jax.config import TaskSection
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.task import Example, as_task, build_task

ROWS = [{"prompt": f"q{i}", "answer": f"a{i}", "solution": f"s{i}", "level": i} for i in range(20)]


def jsonl(path: Path, rows: list) -> str:
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n")
    return str(path)


def parquet(path: Path, rows: list[dict]) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow (extra tasks) is not installed")
    pytest.importorskip("pyarrow.parquet", reason="pyarrow (extra tasks) is not installed").write_table(
        pyarrow.Table.from_pylist(rows), path
    )
    return str(path)


def build(kind: str = "jsonl", **fields):
    return build_task(TaskSection(kind=kind, **fields), 0)


@pytest.mark.parametrize(("kind", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_records_become_examples(tmp_path, kind, write):
    task = build(
        kind, path=write(tmp_path / "train", ROWS[:3]), eval_path=write(tmp_path / "eval", ROWS[3:5]), prompt_template="[{prompt}]"
    )
    assert list(task.train) == [Example(f"[q{i}]", f"a{i}", f"s{i}", i, {"level": i}) for i in range(3)]
    assert [e.prompt for e in task.eval] == ["[q3]", "[q4]"]
    assert task.verify(" a1\n", task.train[1]) == 1.0 and task.verify("a2", task.train[1]) == 0.0
    assert task.name == "train"


@pytest.mark.parametrize(("kind", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_records_take_other_field_names(tmp_path, kind, write):
    rows = [{"q": f"{i}?", "gold": i / 2, "work": f"#### {i / 2}"} for i in range(6)]
    options = {"solution_field": "work", "verifier": "gsm8k"}
    task = build(kind, path=write(tmp_path / "f", rows), prompt_field="q", answer_field="gold", options=options)
    for example in [*task.train, *task.eval]:
        assert example.answer == str(int(example.prompt[:-1]) / 2) and not example.metadata
        assert task.verify(example.solution, example) == 1.0
        assert task.verify(example.answer, example) == 0.0


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.33, 0.99])
def test_records_hold_out_a_share_whatever_the_order(tmp_path, fraction):
    rows = ROWS + [dict(row, answer="twice") for row in ROWS[:7]]
    shuffled = random.Random(1).sample(rows, len(rows))
    first, second = (build(path=jsonl(tmp_path / f"{i}", r), eval_fraction=fraction) for i, r in enumerate((rows, shuffled)))
    held_out = {e.prompt for e in first.eval}
    assert held_out == {e.prompt for e in second.eval}
    assert len(held_out) == len(first.eval) == min(math.ceil(fraction * 20), 19)
    assert held_out | {e.prompt for e in first.train} == {row["prompt"] for row in ROWS}
    assert not held_out & {e.prompt for e in first.train}


def test_records_in_both_files_are_dropped_from_training(tmp_path):
    task = build(path=jsonl(tmp_path / "t", ROWS[:10]), eval_path=jsonl(tmp_path / "e", ROWS[8:12]))
    assert [e.prompt for e in task.train] == [f"q{i}" for i in range(8)]
    assert len(task.eval) == 4
    assert task.notes == ("2 of 10 training records dropped: their prompts are held out",)


def test_jsonl_broken_lines_are_one_error(tmp_path):
    lines = [
        ROWS[0], b"{not json", {"answer": "a"}, {"prompt": "  ", "answer": "a"}, b"", {"prompt": "q",
        "answer": None}, [1], {"prompt": 3, "answer": "a"},
        b'{"prompt": "\xff", "answer": "a"}', {"prompt": "q", "answer": "a", "solution": 5}, b"7",
        b"[" * 100_000, {"prompt": "q"}, {"prompt": "", "answer": ""},
    ]  # fmt: skip
    path = jsonl(tmp_path / "bad.jsonl", lines)
    with pytest.raises(UserError) as error:
        build(path=path)
    text = str(error.value)
    assert "12 broken records" in text and text.endswith("and 2 more")
    for number, reason in [
        (2, "not JSON"), (3, "no field 'prompt' (has 'answer')"), (4, "'prompt' is empty"), (6, "'answer' is null"),
        (7, "not an object but list"),
        (8, "'prompt' is int, expected text"), (9, "not UTF-8"), (10, "'solution' is int, expected text"),
        (11, "not an object but int"), (12, "not JSON"),
    ]:  # fmt: skip
        assert f"{path}:{number}: {reason}" in text, (number, text)
    assert f"{path}:13" not in text


def test_jsonl_byte_order_mark_blank_lines_and_unicode(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('\ufeff{"prompt": "é\u2028x", "answer": "ü"}\r\n\r\n{"prompt": "b", "answer": "c"}', "utf-8")
    task = build(path=str(path))
    assert {e.prompt for e in [*task.train, *task.eval]} == {"é\u2028x", "b"}


def test_parquet_broken_rows_are_one_error(tmp_path):
    path = parquet(tmp_path / "f.parquet", [ROWS[0], {**ROWS[1], "answer": None}, {**ROWS[2], "prompt": ""}])
    with pytest.raises(UserError) as error:
        build("parquet", path=path)
    assert f"{path}:2: 'answer' is null" in str(error.value) and f"{path}:3: 'prompt' is empty" in str(error.value)
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(UserError, match="parquet: cannot read"):
        build("parquet", path=str(tmp_path / "no.parquet"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "no.jsonl"}, "no such file: got 'no.jsonl'"),
        ({"path": "."}, "It is a directory"),
        ({}, "got task.path=None"),
        ({"path": "f", "options": {"solutionfield": "x"}}, "got task.options.solutionfield.*Did you mean 'solution_field'"),
        ({"path": "f", "options": {"verifier": "judge"}}, "got task.options.verifier='judge'"),
        ({"path": "f", "options": {"solution_field": "no"}}, "no field 'no'"),
        ({"path": "empty"}, "got 0 distinct prompts"),
        ({"path": "one"}, "got 1 distinct prompts"),
        ({"path": "one", "eval_path": "one"}, "an empty split: got 0 training and 1 held-out"),
    ],
)
def test_records_raise_on_bad_sources(tmp_path, monkeypatch, fields, message):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "f", ROWS)
    jsonl(tmp_path / "one", ROWS[:1])
    (tmp_path / "empty").write_bytes(b"\n\n")
    with pytest.raises(UserError, match=message):
        build(**fields)


def test_records_verified_by_math_verify_need_a_process(tmp_path):
    task = build(path=jsonl(tmp_path / "f", ROWS), options={"verifier": "math_verify"})
    assert task.separate_process and not build(path=jsonl(tmp_path / "f", ROWS)).separate_process


def test_datasets_from_disk_and_from_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets (extra tasks) is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": datasets.Dataset.from_list(ROWS[:2])}).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    jsonl(tmp_path / "files" / "train.jsonl", ROWS)
    one = build("datasets", name=str(tmp_path / "one"), eval_fraction=0.2)
    two = build("datasets", name=str(tmp_path / "two"), options={"eval_split": "test"})
    files = build("datasets", name=str(tmp_path / "files"), eval_fraction=0.2)
    assert (len(one.train), len(one.eval)) == (16, 4) == (len(files.train), len(files.eval))
    assert list(one.train) == list(files.train)
    assert (len(two.train), [e.prompt for e in two.eval]) == (18, ["q0", "q1"])
    assert as_task(whole, TaskSection()).train[0].solution.startswith("s")
    with pytest.raises(UserError, match=r"got task.options.eval_split='dev', expected one of train, test"):
        build("datasets", name=str(tmp_path / "two"), options={"eval_split": "dev"})
    with pytest.raises(UserError, match="cannot load"):
        build("datasets", name=str(tmp_path / "nothing"))


MODULE = """
from jetrl_jax.tasks.task import Example
ROWS = [{"prompt": f"q{i}", "answer": i} for i in range(10)]
def rows(count=10): return ROWS[:count]
def splits(seed): return {"train": ROWS[:5], "eval": [{"prompt": f"seed {seed}", "answer": "a"}]}
def broken(): return [{"prompt": "q"}, {"prompt": "p", "answer": "a"}]
def fails(): raise RuntimeError("no data")
def nothing(): return None
class Mine:
    name = "mine"
    def __init__(self, train): self.train, self.eval = [Example(p, "x") for p in train], [Example("e", "x")]
    def verify(self, completion, example): return 0.25
def mine(): return Mine(["a", "b"])
def leaky(): return Mine(["a", "e"])
def empty(): return Mine([])
def half():
    task = Mine(["a"])
    del task.eval
    return task
NUMBER = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_tasks.py").write_text(MODULE)
    (tmp_path / "user_broken.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_function_tasks(module):
    rows = build("function", name="user_tasks:rows", options={"count": 6})
    assert len(rows.train) + len(rows.eval) == 6 and rows.verify(rows.train[0].answer, rows.train[0]) == 1.0
    assert isinstance(rows.train[0].answer, str) and rows.name == "user_tasks:rows"
    splits = build_task(TaskSection(kind="function", name="user_tasks:splits"), 3)
    assert [e.prompt for e in splits.eval] == ["seed 3"] and len(splits.train) == 5
    assert build("function", name="user_tasks:mine").verify("", None) == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "got task.name=None"),
        ("user_tasks", "expected module:function"),
        ("user_tasks:", "expected module:function"),
        ("user_tasks:no", "has no 'no'"),
        ("user_broken:f", "cannot import 'user_broken': ModuleNotFoundError"),
        ("no_such_module:f", "cannot import"),
        ("user_tasks:NUMBER", "not callable: got int"),
        ("user_tasks:fails", "it failed: RuntimeError: no data"),
        ("user_tasks:nothing", "is no task: got NoneType"),
        ("user_tasks:broken", r"user_tasks:broken:train\[0\]: no field 'answer'"),
        ("user_tasks:leaky", "1 prompts in both splits, the first 'e'"),
        ("user_tasks:empty", "has an empty split: got 0 training and 1"),
        ("user_tasks:half", "without eval"),
    ],
)
def test_function_raises_on(module, name, message):
    with pytest.raises(UserError, match=message):
        build("function", name=name)


EXPLAINED = [{"prompt": f"p{i}", "answer": str(i), "why": f"because {i}"} for i in range(8)]


@pytest.mark.parametrize("split", [False, True])
def test_rows_in_memory_have_the_verifier_and_solutions_that_the_section_names(split):
    rows = {"train": EXPLAINED[:4], "eval": EXPLAINED[4:]} if split else EXPLAINED
    task = as_task(
        rows, TaskSection(options={"verifier": "boxed", "solution_field": "why", "digits": 2})
    )  # digits: of the task it stands for
    example = task.train[0]
    assert example.solution == example.metadata.get("why", example.solution) == f"because {example.answer}"
    assert (task.verify(f"\\boxed{{{example.answer}}}", example), task.verify(example.answer, example)) == (1.0, 0.0)
    with pytest.raises(UserError, match="no field 'because'"):
        as_task(rows, TaskSection(options={"solution_field": "because"}))
    with pytest.raises(UserError, match="unknown verifier"):
        as_task(rows, TaskSection(options={"verifier": "box"}))
    with pytest.raises(UserError, match=r"got task.options.verifer, expected none such. Did you mean 'verifier'\?"):
        as_task(rows, TaskSection(options={"verifer": "boxed"}))


def test_an_option_that_a_task_has_no_use_for_is_refused():
    task = as_task(EXPLAINED, TaskSection())
    with pytest.raises(UserError, match=r"option without an effect: got task.options.verifier.*has|is a Task with a verifier"):
        as_task(task, TaskSection(options={"verifier": "boxed"}))
    assert as_task(task, TaskSection(options={"digits": 2})) is task
