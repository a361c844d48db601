"""The page of `jetrl_jax.commands.report`: a summary, what ran, charts, tables, samples; one string of HTML,
in light and dark.

One colour is one run through the whole page, named once at its top.  Nothing is fetched from outside: the
chart library and the style are in the page.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.record.run_directory import flatten
from jetrl_jax.report.charts import (
    DASHES,
    DRAW_CHARTS,
    RUN_COLOURS,
    chart_sections,
    escape,
    members,
    points_of,
)
from jetrl_jax.report.samples import DRAW_SAMPLES, sample_browsers

if TYPE_CHECKING:
    from jetrl_jax.report.record import RunRecord

LAST_STEPS = 10  # the summary's mean reward is over so many steps


def render(records: Sequence[RunRecord]) -> str:
    """The page about ``records`` (at least one), as one HTML document without any reference to the
    outside.
    """
    title = records[0].name if len(records) == 1 else f"{len(records)} runs"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Written {time.strftime("%Y-%m-%d %H:%M")}. In a chart: drag to zoom, '
        "double-click to return.</p>",
        f'<p class="legend">{_legend(records)}</p>',
        _summary(records),
        _what_ran(records),
        *chart_sections(records),
        _precision(records),
        _config(records),
        sample_browsers(records),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta '
        'name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · training "
        f"report</title>\n<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{DRAW_CHARTS}{DRAW_SAMPLES}</script>\n</body>\n</html>\n"
    )


def _legend(records: Sequence[RunRecord]) -> str:
    def swatch(index: int) -> str:
        style = ("solid", "dashed", "dotted", "double")[index // len(RUN_COLOURS) % len(DASHES)]
        return f'<i style="border-top:3px {style} {RUN_COLOURS[index % len(RUN_COLOURS)]}"></i>'

    return " ".join(
        f'<span class="run">{swatch(index)}{escape(record.name)}</span>'
        for index, record in enumerate(records)
    )


def _summary(records: Sequence[RunRecord]) -> str:
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
    return "<h2>Summary</h2>\n" + _table(headings, rows)


def _steps(record: RunRecord) -> str:
    done, planned = int(record.rows[-1].get("step", 0)), record.config.get("run.steps")
    text = f"{done} of {planned}" if planned is not None else str(done)
    return text + (f", {record.bad_batches} bad batches" if record.bad_batches else "")


def _before_after(record: RunRecord, name: str) -> str:
    """``39.1 → 92.0 % (+52.9)``: the first and the last evaluation."""
    values = _values(record, name)
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.1%}".replace("%", " %")
    return f"{100 * values[0]:.1f} → {100 * values[-1]:.1f} % ({100 * (values[-1] - values[0]):+.1f})"


def _precision(records: Sequence[RunRecord]) -> str:
    tables: dict[str, list[str]] = {}
    for record in records:
        if record.precision.strip():
            tables.setdefault(record.precision.rstrip(), []).append(record.name)
    if not tables:
        return ""
    parts = [
        f'<p class="soft">{escape(", ".join(names))}</p><pre>{escape(text)}</pre>'
        if len(records) > 1
        else f"<pre>{escape(text)}</pre>"
        for text, names in tables.items()
    ]
    short = sum(text.count("\n") for text in tables) < 40
    return "<h2>Precision</h2>\n" + _details(
        "Format of every matrix multiplication", "".join(parts), unfolded=short
    )


def _config(records: Sequence[RunRecord]) -> str:
    """The fields in which the runs differ from one another,
    then those in which they differ from the defaults.
    """
    if not any(record.config for record in records):
        return ""
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
    parts = ["<h2>Config</h2>"]
    if len(records) > 1:
        parts.append(_table(headings, between) if between else '<p class="soft">The configs are equal.</p>')
    parts.append(
        _details("Fields that differ from the defaults", _table(headings, changed)) if changed else ""
    )
    return "\n".join(parts)


def _what_ran(records: Sequence[RunRecord]) -> str:
    """Presets, kernels, engine, versions and machine of each run's newest start:
    first the rows in which the runs differ.
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
    parts = [_table(["", *(record.name for record in records)], differing, kind="facts")] if differing else []
    parts += [_details("The same in all runs", _table(["", "all runs"], same, kind="facts"))] if same else []
    return "\n".join(["<h2>What ran</h2>", *parts]) if parts else ""


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
    """What served an operation and why, in words; empty for what is no choice of an implementation."""
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


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<div class="scroll"><table '
        f'class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _details(summary: str, content: str, unfolded: bool = False) -> str:
    return f"<details{' open' if unfolded else ''}><summary>{escape(summary)}</summary>{content}</details>"


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
    return (
        value
        if isinstance(value, str)
        else "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


_STYLE = """
:root { --ink: #1b1f24; --soft: #5b6470; --line: #d9dee4; --card: #ffffff; --page: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a3adb8; --line: #343c46; --card: #1b2027; --page: #12161b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1400px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 24px; } h2 { margin: 36px 0 12px; font-size: 18px; } h3 { margin: 0; font-size: 15px; }
h3 span { color: var(--soft); font-weight: 400; font-size: 13px; }
.soft { margin: 0; color: var(--soft); font-size: 13px; }
.legend { position: sticky; top: 0; z-index: 10; margin: 8px -24px 0; padding: 8px 24px; background: var(--page); }
.chart { height: 240px; }
.run { display: inline-flex; align-items: center; gap: 6px; margin-right: 14px; color: var(--ink); } .run i { width: 22px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 14px 6px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
figcaption { min-height: 66px; } figcaption .soft { line-height: 1.35; margin: 2px 0 6px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: left; vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
.facts td { white-space: normal; overflow-wrap: anywhere; min-width: 180px; }
.facts td:first-child { white-space: nowrap; color: var(--soft); min-width: 0; }
.bar { display: flex; align-items: center; gap: 8px; margin: 8px 0; } .bar .step { flex: 1; max-width: 420px; min-width: 60px; }
.bar button { background: var(--card); color: var(--ink); border: 1px solid var(--line); border-radius: 6px; padding: 2px 8px; }
.token { min-height: 20px; margin: 4px 0 8px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: 12px; }
.card { padding: 10px 12px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
.card .head { display: flex; justify-content: space-between; margin: 0 0 6px; }
.card pre { margin: 4px 0; padding: 6px 8px; max-height: 260px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.card .prompt { background: none; color: var(--soft); } .card .soft { overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: 8px 0; padding: 12px; font-size: 12px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
details { margin: 10px 0; } summary { cursor: pointer; margin-bottom: 8px; }
.js-plotly-plot :is(.infolayer, .xaxislayer-above, .yaxislayer-above) text { fill: var(--soft) !important; }
.js-plotly-plot .gridlayer path, .js-plotly-plot .zerolinelayer path { stroke: var(--line) !important; }
.js-plotly-plot .hoverlayer text { fill: #1b1f24 !important; }
"""
