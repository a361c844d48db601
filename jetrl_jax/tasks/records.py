"""Tasks from records: JSONL and Parquet files, Hugging Face datasets and rows made by a user's function.

A record needs a prompt (a text, not empty) and an answer that the task's verifier can compare with (a text,
or a finite number, which `jetrl_jax.text.answers` turns into text).  The field ``options.solution_field``
(default: ``solution``, if present) is the worked solution; all other fields are the example's metadata.  All
records of a source are checked before an error is raised, which lists the first ten broken ones as
``file:line`` and counts the rest.

A JSONL file may be compressed by gzip, or by zstd if pyarrow is installed (extra ``tasks``).  The content
decides, not the file name.  Other compressions and formats are refused by name.

Without an eval source, ``ceil(eval_fraction x prompts)`` distinct prompts are held out, those with the
smallest hashes, so that the choice depends only on the prompts, not on their order or the seed.  With an eval
source, training records whose prompt is held out are dropped, and the task's notes give their number.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import numpy as np

from jetrl_jax.config.task import DatasetsSection, FileSection, RowsSection
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError, missing_extra
from jetrl_jax.tasks import verify
from jetrl_jax.tasks.base import Example, check_options, format_prompt, raise_broken
from jetrl_jax.text.answers import answer_text, check_text


@dataclass(frozen=True)
class ListTask:
    """A task with lists of examples, scored by a named verifier of `jetrl_jax.tasks.verify`."""

    name: str
    train: Sequence[Example]
    eval: Sequence[Example]
    verifier_name: str = "exact_match"
    notes: tuple[str, ...] = ()

    @property
    def separate_process(self) -> bool:
        """Whether the verifier needs a worker process."""
        return self.verifier_name in verify.NEEDS_PROCESS

    def verifier(self) -> Callable[[str, Example], float | None]:
        """The verifier without the task, picklable."""
        return verify.VERIFIERS[self.verifier_name]

    def verify(self, completion: str, example: Example) -> float | None:
        """The named verifier's score; None if it cannot judge the answer."""
        return self.verifier()(completion, example)


ROW_OPTIONS = ("solution_field", "verifier")  # options of every task made of records
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_NOT_READ = {  # first bytes of a file -> its format
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file (task.kind: parquet)",
    b"ARROW1": "an Arrow file (task.kind: datasets)",
    b"\x04\x22\x4d\x18": "compressed by lz4",
}

# its place ("file:line"), and the record or a `_Broken` sentence
Row = tuple[str, Any]


class _Broken(str):
    """The reason why a line is not a record."""


def build(section: FileSection | DatasetsSection) -> ListTask:
    """The task of a config with ``kind: jsonl``, ``parquet`` or ``datasets``."""
    if isinstance(section, DatasetsSection):
        check_options(
            "datasets", section.options, [*ROW_OPTIONS, "split", "eval_split", "subset", "revision"]
        )
        return _task(section.name, *_dataset_rows(section), section)
    check_options(section.kind, section.options, ROW_OPTIONS)
    read = jsonl_rows if section.kind == "jsonl" else parquet_rows
    held_out = None if section.eval_path is None else read(section.eval_path, section.answer_field)
    return _task(Path(section.path).name, read(section.path, section.answer_field), held_out, section)


def task_from_rows(
    name: str, train: Iterable[Any], held_out: Iterable[Any] | None, section: RowsSection
) -> ListTask:
    """A task from rows in memory: dicts with the fields of a record.

    Of ``section.options``, only verifier and solution_field are read.
    """
    plain = section.model_copy(
        update={"options": {key: section.options[key] for key in ROW_OPTIONS if key in section.options}}
    )

    def label(rows: Iterable[Any], split: str) -> Iterator[Row]:
        width = _width(rows, section.answer_field)
        return (
            (f"{name}:{split}[{i}]", _narrowed(row, section.answer_field, width))
            for i, row in enumerate(rows)
        )

    return _task(name, label(train, "train"), None if held_out is None else label(held_out, "eval"), plain)


def jsonl_rows(path: str | Path, exact: str | None = None) -> Iterator[Row]:
    """(file:line, record) pairs of a JSONL file; blank lines are skipped, a byte order mark is allowed.

    A number with a decimal point in the field ``exact`` becomes a `Decimal` with all digits of the file.
    """
    path = _file(path)
    number = 0
    try:
        with _open(path) as lines:
            for number, raw in enumerate(lines, start=1):
                where = f"{path}:{number}"
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        yield where, _parsed(text, exact)
                except UnicodeDecodeError as error:
                    yield where, _Broken(f"not UTF-8 ({error.reason} at byte {error.start})")
                except (json.JSONDecodeError, RecursionError, ValueError) as error:
                    yield where, _Broken(f"not JSON ({error})")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"jsonl: cannot read {path} after line {number}: {type(error).__name__}: {error}"
        ) from error


def _parsed(text: str, exact: str | None) -> Any:
    record = json.loads(text, object_pairs_hook=_object)
    if (
        exact is not None
        and isinstance(record, dict)
        and isinstance(record.get(exact), float)
        and math.isfinite(record[exact])
    ):
        record[exact] = json.loads(text, parse_float=Decimal)[exact]
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the field {next(name for name in names if names.count(name) > 1)!r} stands twice in an object"
        )
    return made


def _open(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed."""
    with path.open("rb") as file:
        start = file.read(8)
    for magic, kind in _NOT_READ.items():
        if start.startswith(magic):
            raise UserError(
                f"jsonl: cannot read {path}: it is {kind}, expected JSON lines, plain or compressed by "
                "gzip or zstd."
            )
    if start.startswith(_GZIP):
        return io.BufferedReader(gzip.open(path, "rb"))
    if not start.startswith(_ZSTD):
        return path.open("rb")
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra(f"jsonl: {path} is compressed by zstd", "pyarrow", "tasks") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


def parquet_rows(path: str | Path, exact: str | None = None) -> Iterator[Row]:
    """(file:row, record) pairs of a Parquet file, with rows counted from 1.

    A float in the field ``exact`` keeps the width of its column.
    """
    path = _file(path)
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise missing_extra("parquet", "pyarrow", "tasks") from error
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise UserError(f"parquet: cannot read {path}: {type(error).__name__}: {error}") from error
    width = str(table.schema.field(exact).type) if exact in table.column_names else ""
    number = 0
    for batch in table.to_batches():
        for record in batch.to_pylist():
            number += 1
            yield f"{path}:{number}", _narrowed(record, exact, width)


def _narrowed(record: Any, field: str | None, width: str) -> Any:
    """The record with a float in ``field`` in the width of its column, so that 0.1 stays 0.1."""
    narrow = {"float": np.float32, "float32": np.float32, "halffloat": np.float16, "float16": np.float16}.get(
        width
    )
    if narrow is not None and isinstance(record, dict) and isinstance(record.get(field), float):
        return record | {field: narrow(record[field])}
    return record


def _width(rows: Any, field: str) -> str:
    """The type of a field of a `datasets.Dataset`, or "" if unknown."""
    features = getattr(rows, "features", None)
    return str(getattr(features.get(field), "dtype", "")) if isinstance(features, Mapping) else ""


def _file(path: str | Path) -> Path:
    path = user_path(path)
    if not path.is_file():
        raise UserError(
            f"task: no such file: got {str(path)!r}, expected a file."
            + (" It is a directory." if path.is_dir() else "")
        )
    return path


def _dataset_rows(section: DatasetsSection) -> tuple[Iterator[Row], Iterator[Row] | None]:
    """Rows of a Hugging Face dataset: one saved by ``save_to_disk``, a directory of files, or a hub name."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "datasets", "tasks") from error
    name, options = section.name, section.options
    local = user_path(name)
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            loaded = datasets.load_from_disk(str(local))
        else:
            loaded = datasets.load_dataset(
                str(local) if local.exists() else name,
                options.get("subset"),
                revision=options.get("revision"),
            )
    except Exception as error:
        raise UserError(f"datasets: cannot load {name!r}: {type(error).__name__}: {error}") from error
    splits: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {"train": loaded}

    def rows(key: str, default: str | None) -> Iterator[Row] | None:
        split = options.get(key, default)
        if split is None:
            return None
        if split not in splits:
            raise UserError(
                f"datasets: no such split: got task.options.{key}={split!r}, expected one of "
                f"{', '.join(splits)} of {name}."
            )
        width = _width(splits[split], section.answer_field)
        return (
            (f"{name}:{split}[{i}]", _narrowed(record, section.answer_field, width))
            for i, record in enumerate(splits[split])
        )

    train = rows("split", "train")
    if train is None:
        raise UserError("datasets: no training split: got task.options.split=None, expected a split's name.")
    return train, rows("eval_split", None)


def _examples(rows: Iterable[Row], section: RowsSection, verifier: str, problems: list[str]) -> list[Example]:
    """The examples of a source, checked by the verifier; reasons for broken records go to ``problems``."""
    solution_field = section.options.get("solution_field")
    examples: list[Example] = []
    for where, record in rows:
        reason = _reason(record, section, solution_field, verifier)
        if reason:
            problems.append(f"{where}: {reason}")
            continue
        prompt, answer = record[section.prompt_field], record[section.answer_field]
        name = solution_field or "solution"
        solution = record.get(name)
        used = {section.prompt_field, section.answer_field, name}
        rest = {key: value for key, value in record.items() if key not in used}
        text = format_prompt(section.prompt_template, prompt)
        examples.append(Example(text, answer_text(answer), solution or "", len(examples), rest, where))
    return examples


def _reason(record: Any, section: RowsSection, solution_field: str | None, verifier: str) -> str | None:
    """Why a record cannot be used, or None."""
    if isinstance(record, _Broken):
        return str(record)
    if not isinstance(record, Mapping):
        return f"not an object but {type(record).__name__}"
    missing = [
        name
        for name in (section.prompt_field, section.answer_field, solution_field)
        if name is not None and name not in record
    ]
    if missing:
        return f"no field {', '.join(map(repr, missing))} (has {', '.join(map(repr, record)) or 'none'})"
    prompt, answer = record[section.prompt_field], record[section.answer_field]
    if not isinstance(prompt, str):
        return f"{section.prompt_field!r} is {type(prompt).__name__}, expected text"
    if not prompt.strip():
        return f"{section.prompt_field!r} is empty"
    if answer is None:
        return f"{section.answer_field!r} is null"
    solution = record.get(solution_field or "solution")
    if solution is not None and not isinstance(solution, str):
        return f"{solution_field or 'solution'!r} is {type(solution).__name__}, expected text"
    for name, text in ((section.prompt_field, prompt), (solution_field or "solution", solution or "")):
        try:
            check_text(text)
        except UserError as error:
            return f"{name!r} is no text: {error}"
    problem = verify.answer_problem(verifier, answer)
    return (
        None if problem is None else f"{section.answer_field!r} cannot be compared by {verifier}: {problem}"
    )


def _task(
    name: str, train_rows: Iterable[Row], eval_rows: Iterable[Row] | None, section: RowsSection
) -> ListTask:
    verifier = section.options.get("verifier", "exact_match")
    if verifier not in verify.VERIFIERS:
        raise UserError(
            f"{section.kind}: unknown verifier: got task.options.verifier={verifier!r}, expected one of "
            f"{', '.join(verify.VERIFIERS)}."
        )
    problems: list[str] = []
    train = _examples(train_rows, section, verifier, problems)
    held_out = None if eval_rows is None else _examples(eval_rows, section, verifier, problems)
    raise_broken(name, problems)
    train, held_out, notes = split_examples(name, train, held_out, section.eval_fraction)
    return ListTask(name, train, held_out, verifier, notes)


def split_examples(
    name: str, train: list[Example], held_out: list[Example] | None, eval_fraction: float = 0.0
) -> tuple[list[Example], list[Example], tuple[str, ...]]:
    """(train, held-out, notes) with disjoint prompts; holds out a share of ``train`` if none are given."""
    notes: tuple[str, ...] = ()
    if held_out is None:
        prompts = sorted(
            {e.prompt for e in train},
            key=lambda p: hashlib.sha256(p.encode("utf-8", "surrogatepass")).digest(),
        )
        if len(prompts) < 2:
            raise UserError(
                f"{name}: too few records to hold some out: got {len(prompts)} distinct prompts, "
                "expected at least 2."
            )
        chosen = set(prompts[: min(math.ceil(eval_fraction * len(prompts)), len(prompts) - 1)])
        held_out, train = (
            _distinct(e for e in train if e.prompt in chosen),
            [e for e in train if e.prompt not in chosen],
        )
    else:
        prompts_held = {e.prompt for e in held_out}
        kept = [e for e in train if e.prompt not in prompts_held]
        if len(kept) < len(train):
            notes = (
                f"{len(train) - len(kept)} of {len(train)} training records dropped: their prompts are "
                "held out",
            )
        train = kept
    if not train or not held_out:
        raise UserError(
            f"{name}: an empty split: got {len(train)} training and {len(held_out)} held-out records, "
            "expected at least one each."
        )
    return train, held_out, notes


def _distinct(examples: Iterable[Example]) -> list[Example]:
    """The first example of each prompt."""
    return list({e.prompt: e for e in reversed(list(examples))}.values())[::-1]
