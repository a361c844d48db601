"""Tasks from records: files, Hugging Face datasets, a user's function;
broken input named by file and line.
"""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from jetrl_jax.errors import UserError
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.registry import as_task, build_task
from tests.sections import task_section

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
    return build_task(task_section(kind=kind, **fields), 0)


@pytest.mark.parametrize(("kind", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_records_become_examples(tmp_path, kind, write):
    task = build(
        kind,
        path=write(tmp_path / "train", ROWS[:3]),
        eval_path=write(tmp_path / "eval", ROWS[3:5]),
        prompt_template="[{prompt}]",
    )
    assert list(task.train) == [Example(f"[q{i}]", f"a{i}", f"s{i}", i, {"level": i}) for i in range(3)]
    assert [e.prompt for e in task.eval] == ["[q3]", "[q4]"]
    assert task.verify(" a1\n", task.train[1]) == 1.0 and task.verify("a2", task.train[1]) == 0.0
    assert task.name == "train"


@pytest.mark.parametrize(("kind", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_records_take_other_field_names(tmp_path, kind, write):
    rows = [{"q": f"{i}?", "gold": i / 2, "work": f"#### {i / 2}"} for i in range(6)]
    options = {"solution_field": "work", "verifier": "gsm8k"}
    task = build(
        kind, path=write(tmp_path / "f", rows), prompt_field="q", answer_field="gold", options=options
    )
    for example in [*task.train, *task.eval]:
        assert example.answer == f"{int(example.prompt[:-1]) / 2:g}" and not example.metadata
        assert task.verify(example.solution, example) == 1.0
        assert task.verify(example.answer, example) == 0.0


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.33, 0.99])
def test_records_hold_out_a_share_whatever_the_order(tmp_path, fraction):
    rows = ROWS + [dict(row, answer="twice") for row in ROWS[:7]]
    shuffled = random.Random(1).sample(rows, len(rows))
    first, second = (
        build(path=jsonl(tmp_path / f"{i}", r), eval_fraction=fraction)
        for i, r in enumerate((rows, shuffled))
    )
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
        (2, "not JSON"), (3, "no field 'prompt' (has 'answer')"), (4, "'prompt' is empty"), (6, "'answer' is " "null"),
        (7, "not an object but list"),
        (8, "'prompt' is int, expected text"), (9, "not UTF-8"), (10, "'solution' is int, expected text"),
        (11, "not an object but int"), (12, "not JSON"),
    ]:  # fmt: skip
        assert f"{path}:{number}: {reason}" in text, (number, text)
    assert f"{path}:13" not in text


BAD_ANSWERS = [
    (b'"1/2"', "got '1/2', expected a number as a whole"), (b'"10 or 12"', "got '10 or 12', expected a " "number"),
    (b'"x"', "got 'x', expected a number"),
    (b'"3, 5, 7"', "got '3, 5, 7'"), (b"true", "got bool True, expected a text or a number"), (b"[18]", "got list [18], " "expected a " "text"),
    (b"NaN", "got float nan, expected a finite number"), (b"-Infinity", "got float -inf"), (b'{"a": 1}', "got " "dict"),
    (b'""', "got '', expected a text"),
    (b'"\\ud800"', "got the lone surrogate U+D800 at character 1"), (b"null", "'answer' is null"),
]  # fmt: skip


def test_jsonl_answers_that_the_verifier_cannot_compare_are_one_error_with_their_lines(tmp_path):
    lines = [{"prompt": f"q{i}", "answer": str(i)} for i in range(30)] + [
        b'{"prompt": "p%d", "answer": %s}' % (i, a) for i, (a, _) in enumerate(BAD_ANSWERS)
    ]
    for verifier in ("boxed", "gsm8k", "last_number"):
        with pytest.raises(UserError) as error:
            build(path=jsonl(tmp_path / "f.jsonl", lines), options={"verifier": verifier})
        assert "12 broken records" in str(error.value)
        for number, (_, reason) in enumerate(BAD_ANSWERS[:10], start=31):
            assert f"f.jsonl:{number}: 'answer' cannot be compared by {verifier}: {reason}" in str(
                error.value
            ), reason
    for answer, reason in BAD_ANSWERS[4:]:
        path = jsonl(tmp_path / "one.jsonl", [ROWS[0], b'{"prompt": "q", "answer": %s}' % answer, ROWS[1]])
        for verifier in ("exact_match", "math_verify"):
            with pytest.raises(UserError) as error:
                build(path=path, options={"verifier": verifier})
            assert (
                "1 broken record:" in str(error.value)
                and f"{path}:2: " in str(error.value)
                and reason in str(error.value)
            )
    assert build(path=jsonl(tmp_path / "good.jsonl", [*ROWS, {"prompt": "q", "answer": "1/2"}]))


@pytest.mark.parametrize("field", ["prompt", "answer", "solution"])
def test_jsonl_lone_surrogates_are_named(tmp_path, field):
    path = jsonl(tmp_path / "f.jsonl", [*ROWS, {**ROWS[0], field: "ab\ud83d"}])
    with pytest.raises(
        UserError, match=rf"f.jsonl:21: '{field}' .*got the lone surrogate U\+D83D at character 3"
    ):
        build(path=path)
    build(path=jsonl(tmp_path / "g.jsonl", [*ROWS, {**ROWS[0], field: "ab\U0001f600"}]))


def test_jsonl_numbers_become_their_shortest_text(tmp_path):
    written = [
        b"42",
        b"42.0",
        b"1e-05",
        b"0.1",
        b"-0.0",
        b"3.14159265358979323846264338327950288",
        b"1e3",
        b'"42.0"',
        b"12345678901234567890123",
    ]
    lines = [b'{"prompt": "p%d", "answer": %s, "x": 0.5}' % (i, text) for i, text in enumerate(written)]
    task = build(path=jsonl(tmp_path / "t", lines), eval_path=jsonl(tmp_path / "e", ROWS))
    assert [e.answer for e in task.train] == [
        "42", "42", "0.00001", "0.1", "0", "3.14159265358979323846264338327950288", "1000", "42.0", "12345678901234567890123",
    ]  # fmt: skip
    assert all(e.metadata == {"x": 0.5} and task.verify(e.answer, e) == 1.0 for e in task.train)
    assert task.train[1].source.endswith("t:2") and task.verify("42", task.train[1]) == 1.0


def test_floats_keep_the_width_of_their_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow (extra tasks) is not installed")
    import pyarrow.parquet as parquet_files

    prompts, eval_path = ["a", "b", "c"], parquet(tmp_path / "e", [{"prompt": "z", "answer": 1.0}])
    for kind, values, expected in [
        (pyarrow.float32(), [0.1, 42.0, 2.5], ["0.1", "42", "2.5"]), (pyarrow.float64(), [0.1, 42.0, 1e-5], ["0.1", "42", "0.00001"]),
        (pyarrow.float16(), np.float16([0.1, 42, 2.5]), ["0.1", "42", "2.5"]), (pyarrow.int32(), [1, 2, 3], ["1", "2", "3"]),
    ]:  # fmt: skip
        table = pyarrow.table(
            {
                "prompt": prompts,
                "answer": pyarrow.array(values, kind),
                "level": pyarrow.array([0.1] * 3, pyarrow.float32()),
            }
        )
        parquet_files.write_table(table, tmp_path / "t.parquet")
        task = build("parquet", path=str(tmp_path / "t.parquet"), eval_path=eval_path)
        assert [e.answer for e in task.train] == expected
        assert task.train[0].metadata["level"] == float(np.float32(0.1))
    for column in (
        [True, False, True],
        [b"a", b"b", b"c"],
        [[1], [2], [3]],
        [float("nan")] * 3,
        [datetime.date(2024, 1, 1)] * 3,
    ):
        parquet_files.write_table(
            pyarrow.table({"prompt": prompts, "answer": pyarrow.array(column)}), tmp_path / "t.parquet"
        )
        with pytest.raises(
            UserError, match=r"t.parquet:1: 'answer' cannot be compared by exact_match: got \w+ .*, expected"
        ):
            build("parquet", path=str(tmp_path / "t.parquet"), eval_path=eval_path)


def test_jsonl_compressed_files_are_read_or_refused_by_name(tmp_path):
    plain = jsonl(tmp_path / "f.jsonl", ROWS)
    content, whole = Path(plain).read_bytes(), build(path=plain)
    half = len(content) // 2
    for name, raw in [
        ("a.jsonl.gz", gzip.compress(content)), ("b.jsonl", gzip.compress(content)), ("c.jsonl.gz", content),
        ("d.jsonl.gz", gzip.compress(content[:half]) + gzip.compress(content[half:])),
    ]:  # fmt: skip
        (tmp_path / name).write_bytes(raw)
        task = build(path=str(tmp_path / name))
        assert (list(task.train), list(task.eval)) == (list(whole.train), list(whole.eval))
    packed = gzip.compress(content)
    for name, raw, reason in [
        ("a.bz2", bz2.compress(content), "compressed by bzip2"), ("a.xz", lzma.compress(content), "compressed by xz"),
        ("a.zip", b"PK\x03\x04" + content, "a zip archive"), ("a.parquet", b"PAR1" + content, "a Parquet " "file"),
        ("cut.gz", packed[: len(packed) // 2], "EOFError"), ("bad.gz", packed[:30] + b"\x00" * 8 + packed[38:], "error|Error|not " "JSON"),
    ]:  # fmt: skip
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=rf"{name}.*(?:{reason})"):
            build(path=str(tmp_path / name))


def test_jsonl_zstd_is_read_where_pyarrow_is_installed(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow (extra tasks) is not installed")
    content = Path(jsonl(tmp_path / "f.jsonl", ROWS)).read_bytes()
    frames = [
        pyarrow.compress(content[:500], "zstd", asbytes=True),
        pyarrow.compress(content[500:], "zstd", asbytes=True),
    ]
    (tmp_path / "f.jsonl.zst").write_bytes(b"".join(frames))
    (tmp_path / "cut.jsonl.zst").write_bytes(frames[0] + frames[1][:-20])
    assert list(build(path=str(tmp_path / "f.jsonl.zst")).train) == list(
        build(path=str(tmp_path / "f.jsonl")).train
    )
    with pytest.raises(UserError, match=r"cut\.jsonl\.zst"):
        build(path=str(tmp_path / "cut.jsonl.zst"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"f.jsonl.zst is compressed by zstd: needs the package pyarrow"):
        build(path=str(tmp_path / "f.jsonl.zst"))


def test_jsonl_fields_that_stand_twice_are_named(tmp_path):
    path = jsonl(tmp_path / "f.jsonl", [*ROWS, b'{"prompt": "q", "answer": 1, "answer": 2}'])
    with pytest.raises(UserError, match=r"f.jsonl:21: not JSON \(the field 'answer' stands twice"):
        build(path=path)


def test_jsonl_byte_order_mark_blank_lines_and_unicode(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text(
        '\ufeff{"prompt": "é\u2028x", "answer": "ü"}\r\n\r\n{"prompt": "b", "answer": "c"}', "utf-8"
    )
    task = build(path=str(path))
    assert {e.prompt for e in [*task.train, *task.eval]} == {"é\u2028x", "b"}


def test_parquet_broken_rows_are_one_error(tmp_path):
    path = parquet(tmp_path / "f.parquet", [ROWS[0], {**ROWS[1], "answer": None}, {**ROWS[2], "prompt": ""}])
    with pytest.raises(UserError) as error:
        build("parquet", path=path)
    assert f"{path}:2: 'answer' is null" in str(error.value) and f"{path}:3: 'prompt' is empty" in str(
        error.value
    )
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(UserError, match="parquet: cannot read"):
        build("parquet", path=str(tmp_path / "no.parquet"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "no.jsonl"}, "no such file: got 'no.jsonl'"),
        ({"path": "."}, "It is a directory"),
        (
            {"path": "f", "options": {"solutionfield": "x"}},
            "got task.options.solutionfield.*Did you mean 'solution_field'",
        ),
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
    datasets.DatasetDict({"train": whole, "test": datasets.Dataset.from_list(ROWS[:2])}).save_to_disk(
        tmp_path / "two"
    )
    (tmp_path / "files").mkdir()
    jsonl(tmp_path / "files" / "train.jsonl", ROWS)
    one = build("datasets", name=str(tmp_path / "one"), eval_fraction=0.2)
    two = build("datasets", name=str(tmp_path / "two"), options={"eval_split": "test"})
    files = build("datasets", name=str(tmp_path / "files"), eval_fraction=0.2)
    assert (len(one.train), len(one.eval)) == (16, 4) == (len(files.train), len(files.eval))
    assert list(one.train) == list(files.train)
    assert (len(two.train), [e.prompt for e in two.eval]) == (18, ["q0", "q1"])
    assert as_task(whole, task_section()).train[0].solution.startswith("s")
    kinds = datasets.Features({"prompt": datasets.Value("string"), "answer": datasets.Value("float32")})
    narrow = datasets.Dataset.from_dict(
        {"prompt": ["a", "b", "c"], "answer": [0.1, 0.1, 0.1]}, features=kinds
    )
    narrow.save_to_disk(tmp_path / "narrow")
    for task in (as_task(narrow, task_section()), build("datasets", name=str(tmp_path / "narrow"))):
        assert {e.answer for e in [*task.train, *task.eval]} == {"0.1"}
    with pytest.raises(UserError, match=r"got task.options.eval_split='dev', expected one of train, test"):
        build("datasets", name=str(tmp_path / "two"), options={"eval_split": "dev"})
    with pytest.raises(UserError, match="cannot load"):
        build("datasets", name=str(tmp_path / "nothing"))


MODULE = """
from jetrl_jax.tasks.base import Example
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
    splits = build_task(task_section(kind="function", name="user_tasks:splits"), 3)
    assert [e.prompt for e in splits.eval] == ["seed 3"] and len(splits.train) == 5
    assert build("function", name="user_tasks:mine").verify("", None) == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
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
        rows, task_section(options={"verifier": "boxed", "solution_field": "why", "digits": 2})
    )  # digits: of the task it stands for
    example = task.train[0]
    assert example.solution == example.metadata.get("why", example.solution) == f"because {example.answer}"
    assert (task.verify(f"\\boxed{{{example.answer}}}", example), task.verify(example.answer, example)) == (
        1.0,
        0.0,
    )
    with pytest.raises(UserError, match="no field 'because'"):
        as_task(rows, task_section(options={"solution_field": "because"}))
    with pytest.raises(UserError, match="unknown verifier"):
        as_task(rows, task_section(options={"verifier": "box"}))
    with pytest.raises(
        UserError, match=r"got task.options.verifer, expected none such. Did you mean 'verifier'\?"
    ):
        as_task(rows, task_section(options={"verifer": "boxed"}))


def test_an_option_that_a_task_has_no_use_for_is_refused():
    task = as_task(EXPLAINED, task_section())
    with pytest.raises(
        UserError, match=r"option without an effect: got task.options.verifier.*has|is a Task with a verifier"
    ):
        as_task(task, task_section(options={"verifier": "boxed"}))
    assert as_task(task, task_section(options={"digits": 2})) is task
