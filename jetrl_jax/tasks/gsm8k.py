"""GSM8K: grade school word problems whose worked answers end in ``#### 42``.

Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021); files ``train.jsonl`` (7,473)
and ``test.jsonl`` (1,319), fields ``question`` and ``answer``.  The directory is ``task.path``, else the
environment variable ``GSM8K_DIR``, else ``shared/data/gsm8k`` beside the checkout.  The worked solution is
the file's unchanged answer, with calculator marks ``<<2+3=5>>``; the example's answer is its final number.

``options.extraction`` chooses where a completion's number is read: ``hash`` (the default: after the last
``####``, so a number in the working does not count), ``boxed`` or ``last_number``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jetrl_jax.config.task import Gsm8kSection
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.tasks import records
from jetrl_jax.tasks.base import Example, check_options, format_prompt, raise_broken
from jetrl_jax.tasks.records import ListTask
from jetrl_jax.text.answers import check_text
from jetrl_jax.text.numbers_in_text import hash_line, whole_number

_EXTRACTION = {"hash": "gsm8k", "boxed": "boxed", "last_number": "last_number"}


def directory(path: str | None) -> Path:
    """The directory of the files: ``path``, else ``GSM8K_DIR``, else beside the checkout."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
    return user_path(path or os.environ.get("GSM8K_DIR") or beside)


def build(section: Gsm8kSection) -> ListTask:
    """The task of a config with ``kind: gsm8k``: train.jsonl to train on, test.jsonl held out."""
    check_options("gsm8k", section.options, ["extraction"])
    extraction = section.options.get("extraction", "hash")
    if extraction not in _EXTRACTION:
        raise UserError(
            f"gsm8k: unknown extraction: got task.options.extraction={extraction!r}, expected one of "
            f"{', '.join(_EXTRACTION)}."
        )
    folder = directory(section.path)
    missing = [name for name in ("train.jsonl", "test.jsonl") if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"gsm8k: no {' and no '.join(missing)} in {str(folder)!r}. Set task.path or GSM8K_DIR to "
            "the directory that holds them."
        )
    problems: list[str] = []
    train, held_out = (
        _examples(folder / name, section.prompt_template, problems) for name in ("train.jsonl", "test.jsonl")
    )
    raise_broken("gsm8k", problems)
    train, held_out, notes = records.split_examples("gsm8k", train, held_out)
    return ListTask("gsm8k", train, held_out, _EXTRACTION[extraction], notes)


def _examples(path: Path, template: str, problems: list[str]) -> list[Example]:
    examples: list[Example] = []
    for where, row in records.jsonl_rows(path):
        reason = _reason(row)
        if reason:
            problems.append(f"{where}: {reason}")
            continue
        number = whole_number(hash_line(row["answer"]) or "")
        examples.append(
            Example(
                format_prompt(template, row["question"]),
                f"{number:f}",
                row["answer"],
                len(examples),
                {},
                where,
            )
        )
    return examples


def _reason(row: Any) -> str | None:
    """Why a line is not a problem with an answer, or None if it is."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else "not an object"
    question, worked = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        return "no question"
    line = hash_line(worked) if isinstance(worked, str) else None
    if not isinstance(worked, str) or line is None:
        return "no '#### number' in the answer"
    if whole_number(line) is None:
        return (
            f"no '#### number' in the answer: got {line.strip()[:60]!r} there, expected a number as a whole"
        )
    try:
        check_text(question + worked)
    except UserError as error:
        return f"no text: {error}"
    return None
