"""The precision study: every flow from the same warm start and data order, several seeds each, one page:
``make study``.

    python tests/benchmarks/study.py --config configs/tiny_cpu.yaml --out runs/study [--seeds 0 1 2] [--rows
    bf16 fp8_unified ...]

Each run is a directory ``OUT/ROW/seedS`` of `jetrl_jax.train`.  A finished run is not run again and an
unfinished one is resumed, so a study can be made in short stretches.  Writes ``OUT/study.html`` (one chart a
metric: the median over the seeds as a line, smallest to largest as a band), ``OUT/study.md`` (the table) and
``OUT/study.json`` (its numbers).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetrl_jax.config.load import load_config
from jetrl_jax.record.metrics import find_metric, read_metrics

ROWS: dict[str, tuple[str, ...]] = {
    "bf16": ("precision.preset=bf16",),
    "fp16": ("precision.preset=fp16",),
    "fp8_unified": ("precision.preset=fp8_unified",),
    "bf16 FP8 cache": ("precision.preset=bf16", "precision.kv_cache=fp8"),
    "fp8_unified FP8 cache": ("precision.preset=fp8_unified", "precision.kv_cache=fp8"),
    "fp8_unified dual": ("precision.preset=fp8_unified", "precision.wgrad_operand=dual"),
    "fp8_unified block": ("precision.preset=fp8_unified", "precision.wgrad_operand=block"),
    "fp8_forward": ("precision.preset=fp8_forward",),
    "fp8_rollout_only": ("precision.preset=fp8_rollout_only",),
    "fp8_rollout_only TIS": ("precision.preset=fp8_rollout_only", "correction.weight=token_truncate"),
    "fp8_rollout_only 1 bit": ("precision.preset=fp8_rollout_only",),
    "fp8_rollout_only 1 bit TIS": ("precision.preset=fp8_rollout_only", "correction.weight=token_truncate"),
}
MANTISSA_BITS = {row: 1 for row in ROWS if "1 bit" in row}  # of the rollout's weights: `coarse_rollout`
CHARTS = (
    "reward/mean",
    "eval/accuracy",
    "mismatch/logprob_abs_mean",
    "mismatch/logprob_abs_max",
    "mismatch/k3",
    "mismatch/ess",
    "mismatch/chi2_token",
    "clip/negative_fraction",
    "policy/entropy",
    "optimizer/grad_norm",
)
LOGARITHMIC = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/k3", "mismatch/chi2_token")
COLOURS = (
    "#2f7ed8",
    "#8a8d93",
    "#2f9e63",
    "#2aa0b3",
    "#c29a1b",
    "#b04fb5",
    "#d1495b",
    "#e0732d",
    "#5b4b8a",
    "#7a5c3e",
)
COARSE = Path(__file__).with_name("coarse_rollout.py")
THRESHOLD = 0.8  # of the mean reward over WINDOW steps
WINDOW = 5
COLLAPSE = 0.2  # below the best mean reward over WINDOW steps at the end

Rows = list[dict[str, float]]


def directory(out: Path, row: str, seed: int) -> Path:
    """Where a run lies."""
    return out / row.replace(" ", "_") / f"seed{seed}"


def run(config: Path, out: Path, row: str, seed: int, steps: int, overrides: Sequence[str]) -> Rows:
    """The metrics of a run, which is made or finished where it is not."""
    path = directory(out, row, seed)
    metrics = path / "metrics.jsonl"
    if not metrics.exists() or read_metrics(metrics)[-1]["step"] < steps or not (path / "export").exists():
        sets = (*ROWS[row], *overrides, f"seed={seed}", f"run.directory={path}")
        bits = MANTISSA_BITS.get(row)
        program = ["-m", "jetrl_jax.train"] if bits is None else [str(COARSE), "--mantissa-bits", str(bits)]
        command = [
            sys.executable,
            *program,
            "--config",
            str(config),
            *(word for s in sets for word in ("--set", s)),
        ]
        print(f"{row}, seed {seed}", flush=True)
        subprocess.run(
            [*command, *(["--resume"] if path.exists() else [])], check=True, stdout=subprocess.DEVNULL
        )
    return read_metrics(metrics)


def smooth(rows: Rows, metric: str) -> np.ndarray:
    """Moving mean over `WINDOW` steps of a metric of each step."""
    values = np.array([row[metric] for row in rows if metric in row and row["step"] > 0])
    return np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")


def summary(rows: Rows) -> dict[str, float]:
    """What the table says of one run."""
    steps, reward = [row for row in rows if row["step"] > 0], smooth(rows, "reward/mean")
    reached = np.flatnonzero(reward >= THRESHOLD)
    scored = [row for row in rows if "eval/accuracy" in row]

    def over(metric: str, function: Callable[[Any], Any]) -> float:
        return float(function([row[metric] for row in steps]))

    return {
        "accuracy before": scored[0]["eval/accuracy"],
        "accuracy": scored[-1]["eval/accuracy"],
        "greedy": scored[-1]["eval/greedy_accuracy"],
        "steps to threshold": float(reached[0] + WINDOW) if len(reached) else float("nan"),
        "collapsed": float(reward[-1] < reward.max() - COLLAPSE),
        "mean |Δ|": over("mismatch/logprob_abs_mean", np.mean),
        "max |Δ|": over("mismatch/logprob_abs_max", np.max),
        "k3": over("mismatch/k3", np.mean),
        "smallest ESS": over("mismatch/ess", np.min),
        "entropy": steps[-1]["policy/entropy"],
        "clip A<0": over("clip/negative_fraction", np.mean),
    }


def spread(values: Sequence[float], digits: str) -> str:
    """Mean and range over the seeds."""
    low, middle, high = (format(function(values), digits) for function in (np.min, np.mean, np.max))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: one line a flow, means and ranges over its seeds."""
    head = ["flow", "accuracy before", "accuracy after", "greedy after", f"steps to reward {THRESHOLD}", "collapsed", "mean abs Δ",
            "max abs Δ", "k3", "smallest ESS", "entropy at the end"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, runs in found.items():
        column = {name: [one[name] for one in runs] for name in runs[0]}
        digits = {"accuracy before": ".3f", "accuracy": ".3f", "greedy": ".3f", "steps to threshold": ".0f", "mean " "|Δ|": ".1e",
                  "max |Δ|": ".1e", "k3": ".1e", "smallest ESS": ".4f", "entropy": ".3f"}  # fmt: skip
        cells = {name: spread(column[name], form) for name, form in digits.items()}
        collapsed = f"{int(sum(column['collapsed']))} of {len(runs)}"
        order = [cells[n] for n in ("accuracy before", "accuracy", "greedy", "steps to threshold")] + [
            collapsed
        ]
        order += [cells[n] for n in ("mean |Δ|", "max |Δ|", "k3", "smallest ESS", "entropy")]
        lines.append("| " + " | ".join([f"`{row}`", *order]) + " |")
    return "\n".join(lines)


def page(found: dict[str, list[Rows]], text: str) -> str:
    """Every chart of `CHARTS`, self-contained."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"{name} [{metric.unit if (metric := find_metric(name)) else ''}]" for name in CHARTS]
    figure = make_subplots(rows=(len(CHARTS) + 1) // 2, cols=2, subplot_titles=titles, vertical_spacing=0.05)
    for (row, runs), colour in zip(found.items(), COLOURS, strict=False):
        for index, metric in enumerate(CHARTS):
            columns = [{r["step"]: r[metric] for r in rows if metric in r} for rows in runs]
            steps = sorted(set.intersection(*(set(c) for c in columns)))
            values = np.array([[c[step] for step in steps] for c in columns])
            if metric in LOGARITHMIC:
                # an exact zero has no place on a logarithmic axis
                values = np.where(values > 0, values, np.nan)
            if values.size == 0 or np.isnan(values).all():
                continue
            place = {"row": index // 2 + 1, "col": index % 2 + 1}
            low, middle, high = np.min(values, 0), np.median(values, 0), np.max(values, 0)
            band = go.Scatter(
                x=[*steps, *steps[::-1]],
                y=[*high, *low[::-1]],
                fill="toself",
                opacity=0.15,
                line_width=0,
                fillcolor=colour,
                legendgroup=row,
                showlegend=False,
                hoverinfo="skip",
            )
            line = go.Scatter(
                x=steps, y=middle, name=row, line_color=colour, legendgroup=row, showlegend=index == 0
            )
            figure.add_trace(band, **place)
            figure.add_trace(line, **place)
            if metric in LOGARITHMIC:
                figure.update_yaxes(type="log", exponentformat="power", **place)
    figure.update_layout(
        height=420 * ((len(CHARTS) + 1) // 2),
        template="plotly_white",
        title="Precision flows: median and range over the seeds",
    )
    body = str(figure.to_html(include_plotlyjs=True, full_html=False))
    return f"<!doctype html><meta charset=utf-8><title>Precision study</title>\n{body}\n<pre>{text}</pre>\n"


def main() -> None:
    """Runs what is missing, then writes page, table and numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/tiny_cpu.yaml"))
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="for every run"
    )
    options = parser.parse_args()
    steps = load_config(options.config, options.overrides).run.steps
    found = {
        row: [run(options.config, options.out, row, seed, steps, options.overrides) for seed in options.seeds]
        for row in options.rows
    }
    summaries = {row: [summary(rows) for rows in runs] for row, runs in found.items()}
    text = table(summaries)
    (options.out / "study.md").write_text(text + "\n", encoding="utf-8")
    about = {
        "config": str(options.config),
        "seeds": options.seeds,
        "steps": steps,
        "system": platform.platform(),
    }
    (options.out / "study.json").write_text(
        json.dumps(about | {"rows": summaries}, indent=1), encoding="utf-8"
    )
    (options.out / "study.html").write_text(page(found, text), encoding="utf-8")
    print(text)
    print(f"\nwritten to {options.out / 'study.html'}")


if __name__ == "__main__":
    main()
