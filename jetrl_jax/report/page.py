"""Renders a report's page as one HTML string: summary, versions, charts, tables, samples; light and dark.

Each run has one colour throughout the page, named once at the top.  The content is made here and in `charts`;
the template `page.html.j2` has the design, and escapes text written by runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.record.run_directory import flatten
from jetrl_jax.report.charts import DASHES, RUN_COLOURS, chart_sections, members, points_of
from jetrl_jax.report.record import RunRecord

LAST_STEPS = 10  # the number of steps in the summary's mean reward
MAX_STEPS = 60  # the number of a run's steps with samples on the page, evenly spread
MAX_SAMPLES = 16  # per step
BORDERS = ("solid", "dashed", "dotted", "double")  # of the legend, for the `DASHES` of the charts


@dataclass(frozen=True)
class Table:
    """Cells of text."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(records: Sequence[RunRecord]) -> str:
    """The page about ``records`` (at least one), as one self-contained HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}  # keys keep the file's order
    return environment.get_template("page.html.j2").render(
        title=records[0].name if len(records) == 1 else f"{len(records)} runs",
        written=time.strftime("%Y-%m-%d %H:%M"),
        plotly=get_plotlyjs(),
        several=len(records) > 1,
        legend=[_legend(index, record.name) for index, record in enumerate(records)],
        summary=_summary(records),
        **_what_ran(records),
        sections=chart_sections(records),
        precision=_precision(records),
        config=_config(records),
        browsers=[
            (record.name, steps, record.config.get("task.kind") == "environment")
            for record in records
            if (steps := sample_steps(record.samples))
        ],
    )


def _legend(index: int, name: str) -> dict[str, str]:
    style = BORDERS[index // len(RUN_COLOURS) % len(DASHES)]
    return {"name": name, "style": style, "colour": RUN_COLOURS[index % len(RUN_COLOURS)]}


def sample_steps(samples: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The samples of each step, in order; at most `MAX_STEPS` evenly spread steps, with first and last."""
    by_step: dict[Any, list[dict[str, Any]]] = {}
    for sample in samples:
        if len(kept := by_step.setdefault(sample.get("step"), [])) < MAX_SAMPLES:
            kept.append(sample)
    steps = list(by_step.values())
    if len(steps) <= MAX_STEPS:
        return steps
    return [steps[round(place * (len(steps) - 1) / (MAX_STEPS - 1))] for place in range(MAX_STEPS)]


def _summary(records: Sequence[RunRecord]) -> Table:
    passes = sorted({int(member) for _, member in members(records, "eval/pass_at_*") if member.isdecimal()})
    headings = ["run", "precision", "steps", "accuracy", "greedy accuracy"]
    headings += [f"pass@{passes[-1]}"] if passes else []
    headings += [f"reward, last {LAST_STEPS} steps", "mean k3", "mean |Δ logprob|", "max |Δ logprob|"]
    headings += ["median s/step", "median rollout tokens/s"]
    rows = []
    for record in records:
        cells = [record.name, str(record.config.get("precision.preset", "")), _steps(record)]
        cells += [_before_after(record, name) for name in ("eval/accuracy", "eval/greedy_accuracy")]
        cells += [_before_after(record, f"eval/pass_at_{passes[-1]}")] if passes else []
        cells.append(_number(_mean(_values(record, "reward/mean")[-LAST_STEPS:]), ".3f"))
        cells += [
            _number(_mean(_values(record, name)), ".2e")
            for name in ("mismatch/k3", "mismatch/logprob_abs_mean")
        ]
        cells.append(_number(max(_values(record, "mismatch/logprob_abs_max"), default=math.nan), ".2e"))
        cells.append(_number(_median(_values(record, "time/step_s")), ".3g"))
        cells.append(_number(_median(_values(record, "rate/rollout_tokens_per_s")), ",.0f"))
        rows.append(cells)
    return Table(headings, rows)


def _steps(record: RunRecord) -> str:
    done, planned = int(record.rows[-1].get("step", 0)), record.config.get("run.steps")
    text = f"{done} of {planned}" if planned is not None else str(done)
    return text + (f", {record.bad_batches} bad batches" if record.bad_batches else "")


def _before_after(record: RunRecord, name: str) -> str:
    """The first and the last evaluation, such as ``39.1 → 92.0 % (+52.9)``."""
    values = _values(record, name)
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.1%}".replace("%", " %")
    return f"{100 * values[0]:.1f} → {100 * values[-1]:.1f} % ({100 * (values[-1] - values[0]):+.1f})"


def _precision(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Each table of formats with the names of the runs that have it; None if no run has any."""
    tables: dict[str, list[str]] = {}
    for record in records:
        if record.precision.strip():
            tables.setdefault(record.precision.rstrip(), []).append(record.name)
    return {"tables": tables, "short": sum(text.count("\n") for text in tables) < 40} if tables else None


def _config(records: Sequence[RunRecord]) -> dict[str, Table] | None:
    """The fields in which the runs differ from each other, and those in which they differ from defaults."""
    if not any(record.config for record in records):
        return None
    defaults = flatten(RunConfig().model_dump(mode="json"))
    fields = sorted({name for record in records for name in record.config})
    values = {name: [_value(record.config.get(name, "–")) for record in records] for name in fields}
    headings = ["field", *(record.name for record in records), "default"]
    between = [
        [name, *values[name], _value(defaults.get(name, "–"))]
        for name in fields
        if len(set(values[name])) > 1
    ]
    changed = [
        [name, *values[name], default]
        for name in fields
        if {default := _value(defaults.get(name, "–"))} != set(values[name])
    ]
    return {"between": Table(headings, between), "changed": Table(headings, changed)}


def _what_ran(records: Sequence[RunRecord]) -> dict[str, Table | None]:
    """Presets, kernels, engine, versions and machine of each run's newest start.

    One table has the rows in which the runs differ, the other those that are equal in all.
    """
    columns = [_facts(record) for record in records]
    names = list(dict.fromkeys(name for facts in columns for name in facts))
    rows = [
        [name, *(facts.get(name) or "–" for facts in columns)]
        for name in names
        if any(facts.get(name) for facts in columns)
    ]
    differing = [row for row in rows if len(records) == 1 or len(set(row[1:])) > 1]
    same = [row[:2] for row in rows if row not in differing]
    return {
        "differing": Table(["", *(record.name for record in records)], differing) if differing else None,
        "same": Table(["", "all runs"], same) if same else None,
    }


def _facts(record: RunRecord) -> dict[str, str]:
    environment, config = record.environment, record.config
    engine = environment.get("rollout_engine") or environment.get("engine")
    facts = {
        "precision": str(config.get("precision.preset", "")),
        "exact": _value(config["numerics.exact"]) if "numerics.exact" in config else "",
        "algorithm": str((environment.get("algorithm") or {}).get("name", "")),
        "rollout engine": _in_words(flatten(engine)) if isinstance(engine, dict) else str(engine or ""),
    }
    facts |= {
        name.replace("_", " "): served for name, value in environment.items() if (served := _choices(value))
    }
    devices = (
        f"{environment.get('device_count', '')} × {environment.get('device_kind', '')}" if environment else ""
    )
    processes = environment.get("processes", 1)
    return facts | {
        "device": devices + (f", {processes} processes" if processes != 1 else ""),
        "sharding": _in_words(environment.get("sharding") or {}),
        "packages": _in_words({"Python": environment.get("python", "–"), **environment.get("packages", {})})
        if environment
        else "",
        "variables": _in_words(environment.get("variables") or {}),
        "commit": (environment.get("commit") or "")[:12] + (" + changes" if environment.get("dirty") else ""),
        "last start": f"{environment.get('time', '–')}, start {record.starts}" if environment else "",
        "command": " ".join(str(part) for part in environment.get("command", [])),
    }


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def _choices(value: Any) -> str:
    """The implementation of an operation and the reason, in words; empty for other values."""
    if not isinstance(value, dict) or not value:
        return ""
    if value.keys() == {"name", "reason"}:
        return f"{value['name']} ({value['reason']})"
    if not all(isinstance(one, dict) and one.keys() == {"name", "reason"} for one in value.values()):
        return ""
    by_reason: dict[str, list[str]] = {}
    for operation, choice in value.items():
        by_reason.setdefault(choice["reason"], []).append(f"{operation.replace('_', ' ')} {choice['name']}")
    return "; ".join(f"{', '.join(served)} ({reason})" for reason, served in by_reason.items())


def _values(record: RunRecord, name: str) -> list[float]:
    return [value for _, value in points_of(record.rows, name)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _number(value: float, form: str) -> str:
    if math.isnan(value):
        return "–"
    return "0" if value == 0 else format(value, form)


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
