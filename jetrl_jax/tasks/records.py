"""Tasks from records: JSONL and Parquet files, Hugging Face datasets and rows made by a user's function.

A record needs a prompt (text, not empty) and an answer (anything but null; numbers become text).  The field named by
``options.solution_field`` (``solution`` where present) is the worked solution; all other fields are the example's
metadata.  Every broken record of a source is found before anything is raised: one error lists the first ten as
``file:line`` and counts the rest.

Without an eval source, ``ceil(eval_fraction x prompts)`` distinct prompts are held out, those of the smallest hash: the
choice depends on the prompts alone, not on their order or the seed.  With one, training records whose prompt is held
out are dropped, and the task's notes say how many.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jetrl_jax.config import TaskSection
from jetrl_jax.config_types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.tasks import verify
from jetrl_jax.tasks.task import Example, ListTask, check_options, format_prompt, missing_extra

ROW_OPTIONS = ("solution_field", "verifier")  # of every task that is made of records
_SHOWN = 10  # broken records named in an error

Row = tuple[str, Any]  # where it stands ("file:line"), and the record or the sentence that says why there is none


class _Broken(str):
    """Why a line is no record."""


def build(section: TaskSection) -> ListTask:
    """The task of ``kind: jsonl``, ``parquet`` or ``datasets``."""
    if section.kind == "datasets":
        check_options("datasets", section.options, [*ROW_OPTIONS, "split", "eval_split", "subset", "revision"])
        if section.name is None:
            raise UserError("datasets: no dataset given: got task.name=None, expected a local directory or a hub name.")
        return _task(section.name, *_dataset_rows(section), section)
    check_options(section.kind, section.options, ROW_OPTIONS)
    if section.path is None:
        raise UserError(f"{section.kind}: no file given: got task.path=None, expected the training file.")
    read = jsonl_rows if section.kind == "jsonl" else parquet_rows
    held_out = None if section.eval_path is None else read(section.eval_path)
    return _task(Path(section.path).name, read(section.path), held_out, section)


def task_from_rows(name: str, train: Iterable[Any], held_out: Iterable[Any] | None, section: TaskSection) -> ListTask:
    """A task from rows in memory: dicts with the fields of a record; of ``section.options`` its verifier and solution_field are read."""
    plain = section.model_copy(update={"options": {key: section.options[key] for key in ROW_OPTIONS if key in section.options}})

    def label(rows: Iterable[Any], split: str) -> Iterator[Row]:
        return ((f"{name}:{split}[{i}]", row) for i, row in enumerate(rows))

    return _task(name, label(train, "train"), None if held_out is None else label(held_out, "eval"), plain)


def jsonl_rows(path: str | Path) -> Iterator[Row]:
    """(file:line, record) of a JSONL file; blank lines are passed over, a byte order mark is allowed."""
    path = _file(path)
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield where, json.loads(text)
            except UnicodeDecodeError as error:
                yield where, _Broken(f"not UTF-8 ({error.reason} at byte {error.start})")
            except (json.JSONDecodeError, RecursionError, ValueError) as error:
                yield where, _Broken(f"not JSON ({error})")


def parquet_rows(path: str | Path) -> Iterator[Row]:
    """(file:row, record) of a Parquet file, rows counted from 1."""
    path = _file(path)
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise missing_extra("parquet", "pyarrow", "tasks") from error
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise UserError(f"parquet: cannot read {path}: {type(error).__name__}: {error}") from error
    number = 0
    for batch in table.to_batches():
        for record in batch.to_pylist():
            number += 1
            yield f"{path}:{number}", record


def _file(path: str | Path) -> Path:
    path = user_path(path)
    if not path.is_file():
        raise UserError(f"task: no such file: got {str(path)!r}, expected a file." + (" It is a directory." if path.is_dir() else ""))
    return path


def _dataset_rows(section: TaskSection) -> tuple[Iterator[Row], Iterator[Row] | None]:
    """Rows of a Hugging Face dataset: one saved by ``save_to_disk``, a directory of files, or a hub name."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "datasets", "tasks") from error
    name, options = str(section.name), section.options
    local = user_path(name)
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            loaded = datasets.load_from_disk(str(local))
        else:
            loaded = datasets.load_dataset(str(local) if local.exists() else name, options.get("subset"), revision=options.get("revision"))
    except Exception as error:
        raise UserError(f"datasets: cannot load {name!r}: {type(error).__name__}: {error}") from error
    splits: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {"train": loaded}

    def rows(key: str, default: str | None) -> Iterator[Row] | None:
        split = options.get(key, default)
        if split is None:
            return None
        if split not in splits:
            raise UserError(f"datasets: no such split: got task.options.{key}={split!r}, expected one of {', '.join(splits)} of {name}.")
        return ((f"{name}:{split}[{i}]", record) for i, record in enumerate(splits[split]))

    train = rows("split", "train")
    if train is None:
        raise UserError("datasets: no training split: got task.options.split=None, expected a split's name.")
    return train, rows("eval_split", None)


def _examples(rows: Iterable[Row], section: TaskSection, problems: list[str]) -> list[Example]:
    """The examples of a source; sentences on broken records are added to ``problems``."""
    solution_field = section.options.get("solution_field")
    examples: list[Example] = []
    for where, record in rows:
        reason = _reason(record, section, solution_field)
        if reason:
            problems.append(f"{where}: {reason}")
            continue
        prompt, answer = record[section.prompt_field], record[section.answer_field]
        name = solution_field or "solution"
        solution = record.get(name)
        used = {section.prompt_field, section.answer_field, name}
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        rest = {key: value for key, value in record.items() if key not in used}
        examples.append(Example(format_prompt(section.prompt_template, prompt), answer, solution or "", len(examples), rest))
    return examples


def _reason(record: Any, section: TaskSection, solution_field: str | None) -> str | None:
    """Why a record cannot be used, or None."""
    if isinstance(record, _Broken):
        return str(record)
    if not isinstance(record, Mapping):
        return f"not an object but {type(record).__name__}"
    missing = [name for name in (section.prompt_field, section.answer_field, solution_field) if name is not None and name not in record]
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
    return None


def _task(name: str, train_rows: Iterable[Row], eval_rows: Iterable[Row] | None, section: TaskSection) -> ListTask:
    verifier = section.options.get("verifier", "exact_match")
    if verifier not in verify.VERIFIERS:
        raise UserError(
            f"{section.kind}: unknown verifier: got task.options.verifier={verifier!r}, expected one of {', '.join(verify.VERIFIERS)}."
        )
    problems: list[str] = []
    train = _examples(train_rows, section, problems)
    held_out = None if eval_rows is None else _examples(eval_rows, section, problems)
    raise_broken(name, problems)
    train, held_out, notes = split_examples(name, train, held_out, section.eval_fraction)
    return ListTask(name, train, held_out, verifier, notes)


def raise_broken(name: str, problems: list[str]) -> None:
    """One `UserError` with the first ten sentences and the count of the rest, if there is any."""
    if problems:
        rest = len(problems) - _SHOWN
        lines = problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise UserError(f"{name}: {len(problems)} broken record{'s' * (len(problems) > 1)}:\n  " + "\n  ".join(lines))


def split_examples(
    name: str, train: list[Example], held_out: list[Example] | None, eval_fraction: float
) -> tuple[list[Example], list[Example], tuple[str, ...]]:
    """(train, held-out, notes) with no prompt in both; holds out a share of ``train`` where no held-out set is given."""
    notes: tuple[str, ...] = ()
    if held_out is None:
        prompts = sorted({e.prompt for e in train}, key=lambda p: hashlib.sha256(p.encode("utf-8", "surrogatepass")).digest())
        if len(prompts) < 2:
            raise UserError(f"{name}: too few records to hold some out: got {len(prompts)} distinct prompts, expected at least 2.")
        chosen = set(prompts[: min(math.ceil(eval_fraction * len(prompts)), len(prompts) - 1)])
        held_out, train = _distinct(e for e in train if e.prompt in chosen), [e for e in train if e.prompt not in chosen]
    else:
        prompts_held = {e.prompt for e in held_out}
        kept = [e for e in train if e.prompt not in prompts_held]
        if len(kept) < len(train):
            notes = (f"{len(train) - len(kept)} of {len(train)} training records dropped: their prompts are held out",)
        train = kept
    if not train or not held_out:
        raise UserError(
            f"{name}: an empty split: got {len(train)} training and {len(held_out)} held-out records, expected at least one each."
        )
    return train, held_out, notes


def _distinct(examples: Iterable[Example]) -> list[Example]:
    """The first example of each prompt."""
    return list({e.prompt: e for e in reversed(list(examples))}.values())[::-1]
