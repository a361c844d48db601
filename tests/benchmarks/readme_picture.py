"""README's picture from the records of two runs: ``make picture``.

    python tests/benchmarks/readme_picture.py runs/tiny_cpu runs/mismatch [--out docs/images]

Left: the mean reward of each step of the first run, faint under its moving average.  Right: the mean
  difference between the
trainer's and the engine's log-probabilities of the sampled tokens, of both runs.  Writes
``main_job_light.svg`` and ``main_job_dark.svg``; every point is a row of a ``metrics.jsonl``, and nothing is
measured here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from jetrl_jax.record.metrics import read_metrics

WIDTH, HEIGHT = 860, 300
TOP, BOTTOM = 76, 250  # of both panels
PANELS = ((60, 400), (510, 840))  # left and right edge of each
WINDOW = 10  # steps of the moving average
THEMES = {
    "light": {"ink": "#1f2328", "soft": "#656d76", "line": "#d0d7de", "one": "#0969da", "other": "#cf222e"},
    "dark": {"ink": "#e6edf3", "soft": "#8b949e", "line": "#30363d", "one": "#58a6ff", "other": "#ff7b72"},
}
Rows = Sequence[dict[str, float]]
Points = list[tuple[float, float]]


def series(rows: Rows, metric: str) -> Points:
    """(step, value) of every row that has the metric."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


def moving_average(points: Points) -> Points:
    """The mean of the last `WINDOW` values at each step (of fewer at the start)."""
    values = [value for _, value in points]
    return [
        (step, statistics.fmean(values[max(0, i + 1 - WINDOW) : i + 1])) for i, (step, _) in enumerate(points)
    ]


class Panel:
    """One chart: its scales, and the SVG elements drawn so far."""

    def __init__(
        self, edges: tuple[int, int], title: str, steps: float, ticks: Sequence[tuple[float, str]]
    ) -> None:
        """edges: left and right, in pixels.  ticks: (value, label) from the lowest to the highest value of
        the axis.
        """
        self.left, self.right = edges
        self.steps = steps
        self.low = ticks[0][0]
        self.high = ticks[-1][0]
        self.parts = [f'<text class="ink" x="{self.left}" y="22" font-weight="600">{title}</text>']
        for value, label in ticks:
            y = self.y(value)
            self.parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self.parts.append(
                f'<text class="soft" x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
            )
        for step in (0, steps / 2, steps):
            self.parts.append(
                f'<text class="soft" x="{self.x(step):.1f}" y="{BOTTOM + 18}" '
                f'text-anchor="middle">{step:g}</text>'
            )
        self.parts.append(
            f'<text class="soft" x="{(self.left + self.right) / 2}" y="{BOTTOM + 36}" '
            'text-anchor="middle">step</text>'
        )

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return self.left + (self.right - self.left) * step / self.steps

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return BOTTOM - (BOTTOM - TOP) * (value - self.low) / (self.high - self.low)

    def line(self, points: Points, kind: str, width: float) -> None:
        """A line through all points."""
        drawn = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)
        self.parts.append(f'<polyline class="{kind}" fill="none" stroke-width="{width}" points="{drawn}"/>')

    def legend(self, place: int, kind: str, text: str) -> None:
        """A line's meaning in its colour, below the title."""
        y = 42 + 16 * place
        self.parts.append(
            f'<line class="{kind}" stroke-width="3" x1="{self.left}" x2="{self.left + 18}" y1="{y - 4}" '
            f'y2="{y - 4}"/>'
        )
        self.parts.append(f'<text class="ink" x="{self.left + 26}" y="{y}">{text}</text>')


def picture(unified: Rows, mixed: Rows, theme: str) -> str:
    """The SVG of one theme."""
    reward, zero, gap = (
        series(unified, "reward/mean"),
        series(unified, "mismatch/logprob_abs_mean"),
        series(mixed, "mismatch/logprob_abs_mean"),
    )
    steps = max(step for step, _ in reward + gap)
    left = Panel(
        PANELS[0],
        "It learns: mean reward of a step",
        steps,
        [(value / 5, f"{value / 5:.1f}") for value in range(6)],
    )
    left.line(reward, "faint", 1)
    left.line(moving_average(reward), "one", 2.5)
    left.legend(0, "faint", "each step, with other prompts")
    left.legend(1, "one", f"mean of {WINDOW} steps")
    thousandths = int(max(value for _, value in gap) * 1000) + 1
    marks = sorted({0, thousandths, *range(0, thousandths, max(1, thousandths // 4))})
    ticks = [(mark / 1000, f"{mark}e-3" if mark else "0") for mark in marks]
    right = Panel(PANELS[1], "Trainer against engine: mean |Δ logprob|", steps, ticks)
    right.line(gap, "other", 1.5)
    right.line(zero, "one", 3)
    mean = statistics.fmean(value for _, value in gap)
    right.legend(0, "other", f"FP8 rollout, BF16 training: {mean:.1e} over the run".replace("e-0", "e-"))
    right.legend(
        1,
        "one",
        "one FP8 flow: exactly 0 in every step" if all(value == 0 for _, value in zero) else "one FP8 flow",
    )
    return "\n".join([*_head(THEMES[theme]), *left.parts, *right.parts, "</svg>", ""])


def _head(colours: dict[str, str]) -> list[str]:
    rules = [f".{name}{{fill:{colours[name]}}}" for name in ("ink", "soft")]
    rules += [
        f".{kind}{{stroke:{colours[name]}}}"
        for kind, name in (("grid", "line"), ("one", "one"), ("other", "other"))
    ]
    rules.append(f".faint{{stroke:{colours['one']};stroke-opacity:.35}}")
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<style>{''.join(rules)}</style>",
    ]


def main() -> None:
    """Reads the command line, writes both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("unified", type=Path, metavar="RUN", help="run with one FP8 flow")
    parser.add_argument(
        "mixed", type=Path, metavar="RUN", help="the same with precision.preset=fp8_rollout_only"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    arguments = parser.parse_args()
    runs = [read_metrics(run / "metrics.jsonl") for run in (arguments.unified, arguments.mixed)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        target = arguments.out / f"main_job_{theme}.svg"
        target.write_text(picture(*runs, theme), encoding="utf-8")
        print(f"wrote {target}")


if __name__ == "__main__":
    sys.exit(main())
