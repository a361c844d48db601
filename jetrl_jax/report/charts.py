"""The charts of a report's page: one metric per chart and one colour per run, drawn by plotly.

A line of many steps is drawn faint under its moving average.  Quantities that span orders of magnitude have
logarithmic axes.  A step at which such a quantity is exactly 0 has no point there.  The chart's note counts
these steps, so that the empty chart of an exact flow is explained.
"""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from jetrl_jax.record.metrics import find_metric
from jetrl_jax.report.record import RunRecord

# each legible on white and on black
RUN_COLOURS = ("#2f7ed8", "#e0732d", "#2f9e63", "#b04fb5", "#c29a1b", "#d1495b", "#2aa0b3", "#8a8d93")
DASHES = ("solid", "dash", "dot", "dashdot")  # the next one from the ninth run on
PHASES = {
    "rollout": "#2f7ed8",
    "reward": "#c29a1b",
    "logprob": "#2aa0b3",
    "train": "#e0732d",
    "publish": "#b04fb5",
}
MAX_POINTS = 1500  # per line
SMOOTH_FROM_POINTS = 40
LEFT_OUT = "What was left out"

Points = list[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class Panel:
    """The description of a chart of one metric, or of a chart for each metric of a family.

    ``several``: only if the family has more than one member.  ``largest``: only its last member.
    """

    metric: str
    title: str
    log: bool = False
    smooth: bool = False
    several: bool = False
    largest: bool = False
    from_zero: bool = False


SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Held-out evaluation",
        (
            Panel("eval/accuracy", "Accuracy at the rollout temperature"),
            Panel("eval/greedy_accuracy", "Greedy accuracy"),
            Panel("eval/pass_at_*", "pass@{}", largest=True),
        ),
    ),
    (
        "Reward",
        (
            Panel("reward/mean", "Mean reward", smooth=True),
            Panel("reward/*_mean", "Mean reward of {}", smooth=True, several=True),
            Panel("reward/equal_group_fraction", "Groups without an advantage", smooth=True),
        ),
    ),
    (
        "Mismatch between engine and trainer, on the same tokens",
        (
            Panel("mismatch/k3", "k3", log=True),
            Panel("mismatch/logprob_abs_mean", "Mean |Δ logprob|", log=True),
            Panel("mismatch/logprob_abs_max", "Largest |Δ logprob|", log=True),
            Panel("mismatch/k1", "k1"),
            Panel("mismatch/ess", "Effective sample size"),
            Panel("mismatch/token_mult_prob_error", "Multiplicative probability error"),
        ),
    ),
    (
        "Clipping, entropy, gradient",
        (
            Panel("clip/positive_fraction", "Clipped tokens, A > 0", smooth=True),
            Panel("clip/negative_fraction", "Clipped tokens, A < 0", smooth=True),
            Panel("clip/dual_negative_fraction", "Dual-clipped tokens, A < 0", smooth=True),
            Panel("policy/entropy", "Entropy", smooth=True),
            Panel("policy/reference_kl", "KL to the reference", smooth=True),
            Panel("optimizer/grad_norm", "Gradient norm", log=True),
            Panel("optimizer/learning_rate", "Learning rate", from_zero=True),
        ),
    ),
    (
        "Range of FP8 keys and values",
        (
            Panel("kv/clip_fraction", "Clipped values", from_zero=True),
            Panel("kv/*_exponent_max", "Largest exponent of a layer's scale, {}"),
            Panel("kv/*_exponent_min", "Smallest exponent of a layer's scale, {}"),
        ),
    ),
    (
        "Speculation",
        (
            Panel("speculation/tokens_per_step", "Tokens of a sequence from one forward", from_zero=True),
            Panel("speculation/accepted_fraction", "Guessed tokens that are kept", from_zero=True),
            Panel("speculation/accepted_*_fraction", "The same, of guess {}", from_zero=True, several=True),
            Panel("speculation/length_mean", "Tokens asked of the draft in a forward", from_zero=True),
            Panel("draft/loss", "Loss of the draft head"),
            Panel("draft/overlap", "Share that the draft head has in common with the policy", from_zero=True),
            Panel("draft/skipped_updates", "Updates of the draft head left out"),
        ),
    ),
    (
        "Lengths",
        (
            Panel("length/completion_tokens_mean", "Mean completion length", smooth=True),
            Panel("length/completion_tokens_max", "Longest completion"),
            Panel("length/truncated_fraction", "Truncated completions", smooth=True),
        ),
    ),
    (
        "Episodes",
        (
            Panel("episode/turns_mean", "Mean turns of an episode", smooth=True),
            Panel("eval/turns_mean", "Mean turns of a held-out episode"),
            Panel("episode/tool_calls_mean", "Mean calls of tools", smooth=True),
            Panel("episode/tool_error_fraction", "Calls answered by an error", smooth=True),
            Panel("episode/failed_fraction", "Failed environments"),
            Panel("time/environment_s", "Time of the environments"),
        ),
    ),
    (
        "Time",
        (
            Panel("time/step_s", "Time of a step", log=True),
            Panel("rate/rollout_tokens_per_s", "Rollout throughput", smooth=True),
            Panel("rate/train_tokens_per_s", "Training throughput", smooth=True),
        ),
    ),
    (
        LEFT_OUT,
        (
            Panel("count/masked_samples", "Masked completions"),
            Panel("count/skipped_prompts", "Skipped prompts"),
            Panel("count/skipped_updates", "Skipped updates"),
            Panel("count/reward_*_exception", "Exceptions in {}"),
            Panel("count/reward_*_timeout", "Time-outs in {}"),
            Panel("count/reward_*_none", "No reward from {}"),
            Panel("count/reward_*_nan", "NaN rewards of {}"),
        ),
    ),
)


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    name: of its metric.  figure: plotly's JSON, which the page draws once the grid's widths are known.
    """

    name: str
    title: str
    unit: str
    description: str
    figure: str


def chart_sections(records: Sequence[RunRecord]) -> list[tuple[str, list[Chart]]]:
    """(title, charts) of each section; metrics that no run has and empty sections are left out."""
    sections = []
    for title, panels in SECTIONS:
        charts = [
            chart for panel in panels for chart in _panel_charts(records, panel, skip_zero=title == LEFT_OUT)
        ]
        if title == "Time" and (phases := _phase_chart(records)):
            charts.insert(0, phases)
        if charts:
            sections.append((title, charts))
    return sections


def members(records: Sequence[RunRecord], metric: str) -> list[tuple[str, str]]:
    """(name, the text matched by ``*``) of the metrics of a family, ordered by number, then by name."""
    if "*" not in metric:
        return [(metric, "")]
    pattern = re.compile(re.escape(metric).replace(r"\*", "(.+)"))
    names = {name for record in records for row in record.rows for name in row}
    found = [
        (name, match.group(1))
        for name in names
        if (match := pattern.fullmatch(name)) and _declared_as(name, metric)
    ]
    return sorted(found, key=lambda item: (int(item[1]) if item[1].isdecimal() else 0, item[1]))


def points_of(rows: Iterable[dict[str, float]], name: str) -> Points:
    """(step, value) pairs with finite values."""
    return [
        (row["step"], row[name]) for row in rows if "step" in row and math.isfinite(row.get(name, math.nan))
    ]


def _declared_as(name: str, metric: str) -> bool:
    try:
        return find_metric(name).name == metric
    except ValueError:  # written by another version of this program
        return False


def _panel_charts(records: Sequence[RunRecord], panel: Panel, skip_zero: bool) -> list[Chart]:
    """The charts of a panel, one per metric that any run has; ``skip_zero`` drops those that are always 0."""
    charts: list[Chart] = []
    found = members(records, panel.metric)
    if panel.several and len(found) < 2:
        return charts
    for name, member in found[-1:] if panel.largest else found:
        series = [points_of(record.rows, name) for record in records]
        if any(y != 0 for points in series for _, y in points) or (any(series) and not skip_zero):
            charts.append(_line_chart(records, series, panel, name, member))
    return charts


def _line_chart(
    records: Sequence[RunRecord], series: Sequence[Points], panel: Panel, name: str, member: str
) -> Chart:
    metric = find_metric(name)
    log = panel.log and any(y > 0 for points in series for _, y in points)
    notes, traces = [], []
    for index, (record, points) in enumerate(zip(records, series, strict=True)):
        zeros = sum(1 for _, y in points if y == 0) if panel.log else 0
        if zeros:
            share = "at every step" if zeros == len(points) else f"at {zeros} of {len(points)} steps"
            notes.append(f"{record.name}: exactly 0 {share}" if len(records) > 1 else f"exactly 0 {share}")
        traces += _lines(
            record.name, [(x, y) for x, y in points if y > 0] if log else points, index, smooth=panel.smooth
        )
    figure = go.Figure(traces)
    positive = [y for points in series for _, y in points if y > 0] or [1.0]
    extent = {"smallest": min(positive), "largest": max(positive)}
    figure.update_layout(
        **_layout(log=log, **extent, fraction=metric.unit == "fraction", from_zero=panel.from_zero)
    )
    description = metric.description + (f" — {'; '.join(notes)}" if notes else "")
    return Chart(name, panel.title.format(member), metric.unit, description, figure.to_json())


def _lines(name: str, points: Points, index: int, smooth: bool) -> list[go.Scatter]:
    """The line of a run: with markers if it has few points, faint under its moving average if many."""
    if not points:
        return []
    line = {
        "color": RUN_COLOURS[index % len(RUN_COLOURS)],
        "width": 2,
        "dash": DASHES[index // len(RUN_COLOURS) % len(DASHES)],
    }
    if len(points) <= SMOOTH_FROM_POINTS:
        return [_line(points, name, line, mode="lines+markers", marker={"size": 6})]
    if not smooth:
        return [_line(points, name, line, mode="lines")]
    faint = _line(points, name, {**line, "width": 1}, mode="lines", opacity=0.3, hoverinfo="skip")
    return [faint, _line(_moving_average(points, max(5, len(points) // 25)), name, line, mode="lines")]


def _line(points: Points, name: str, line: dict[str, Any], **options: Any) -> go.Scatter:
    """plotly reads a few tags in names, hence the escape."""
    points = _thin(points)
    return go.Scatter(
        x=[x for x, _ in points], y=[y for _, y in points], name=html.escape(name), line=line, **options
    )


def _thin(points: Points) -> Points:
    """At most about `MAX_POINTS` points: the lowest and highest of each range of steps, to keep peaks."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def _moving_average(points: Points, window: int) -> Points:
    """The mean of the last ``window`` values at each point (fewer at the start)."""
    values = [y for _, y in points]
    return [
        (x, statistics.fmean(values[max(0, index + 1 - window) : index + 1]))
        for index, (x, _) in enumerate(points)
    ]


def _phase_chart(records: Sequence[RunRecord]) -> Chart | None:
    """Stacked bars with the mean seconds of each phase, one bar per run.

    The first step, which compiles, is left out if there are more.
    """
    names = [html.escape(record.name) for record in records]
    traces = []
    for phase, colour in PHASES.items():
        series = [[y for _, y in points_of(record.rows, f"time/{phase}_s")] for record in records]
        means = [statistics.fmean(values[1:] or values) if values else 0.0 for values in series]
        if any(means):
            traces.append(
                go.Bar(
                    y=names,
                    x=means,
                    name=phase,
                    orientation="h",
                    marker={"color": colour},
                    hovertemplate="%{x:.3g} s",
                )
            )
    if not traces:
        return None
    figure = go.Figure(traces)
    bars = {
        "barmode": "stack",
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": _axis("seconds per step"),
        "yaxis": _axis("") | {"autorange": "reversed", "automargin": True},
        "hovermode": "y unified",
        "margin": {"l": 56, "r": 12, "t": 40, "b": 40},
    }
    figure.update_layout(_layout() | bars)
    description = "mean over the steps; the first one, which compiles, is left out"
    return Chart("phases", "Time per phase", "s", description, figure.to_json())


def _layout(
    *,
    log: bool = False,
    smallest: float = 1.0,
    largest: float = 1.0,
    fraction: bool = False,
    from_zero: bool = False,
) -> dict[str, Any]:
    """The common layout: a transparent background, and colours that the page's styles override."""
    vertical = _axis("")
    if log:
        small, decades = smallest < 0.01, math.log10(largest / smallest)
        vertical |= {
            "type": "log",
            "tickformat": "~e" if small else "~g",
            "dtick": 1 if decades > 1.5 else "D2",
        }
    elif fraction:
        vertical |= {"tickformat": "~%", "hoverformat": ".2%", "rangemode": "tozero"}
    elif from_zero:
        vertical |= {"rangemode": "tozero", "exponentformat": "power"}
    return {
        "template": None,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "family": "system-ui, sans-serif", "color": "#7a828c"},
        "margin": {"l": 56, "r": 12, "t": 8, "b": 40},
        "xaxis": _axis("step"),
        "yaxis": vertical,
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#f6f7f9", "font": {"color": "#1b1f24"}},
    }


def _axis(title: str) -> dict[str, Any]:
    colours = dict.fromkeys(("gridcolor", "zerolinecolor", "linecolor", "tickcolor"), "#8a8d93")
    return {"title": {"text": title, "standoff": 6}, **colours}
