"""Whole training runs of several precision flows, in turns on one machine: ``make bench-train``.

    python tests/benchmarks/train_flows.py --config configs/qwen3_100m_gpu.yaml [--flows fp8_unified bf16]
    [--stretches 3] [--steps 8]

A flow is a preset of `precision`, with "-exact" or "-fast" behind it one with `numerics.exact` true or
false.  Each is one run of `jetrl_jax.train`, made in stretches of steps: after a stretch it stops with a
checkpoint, the next flow has its turn, and the run is resumed; every second round goes through the flows
backward, so that a machine that drifts drifts for all.  The first rows of a stretch, which compile, are left
out of the times.  Printed, and written as JSON, for each flow: which implementation served which operation
(the run's own record); tokens a second of rollout and of training and seconds a step, as the median over the
steps with quartiles, and the smallest and largest median of a stretch; the largest difference between engine
and trainer in the logprob of a sampled token, over all steps.  Against the last flow named: the ratios of the
medians of each turn, so that what slows a whole turn down counts in neither.

The learning rate is constant here, since a run whose rate follows its length cannot be made longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetrl_jax.commands.entry import run_entry_point
from jetrl_jax.config.load import load_config
from jetrl_jax.errors import RunStopped
from jetrl_jax.record.metrics import read_metrics
from jetrl_jax.record.run_directory import ENVIRONMENT_FILE, METRICS_FILE, PRECISION_FILE

ROOT = Path(__file__).resolve().parents[2]
METRICS = {
    "rollout, tokens/s": "rate/rollout_tokens_per_s",
    "training, tokens/s": "rate/train_tokens_per_s",
    "step, s": "time/step_s",
}
MISMATCH = "mismatch/logprob_abs_max"
EXACT = {"-exact": "true", "-fast": "false"}
Rows = Sequence[Mapping[str, float]]
Stretches = list[list[float]]


def turns(flows: Sequence[str], stretches: int) -> list[tuple[int, str]]:
    """(number of the stretch, flow) in the order they are run."""
    return [
        (index, flow) for index in range(stretches) for flow in (flows if index % 2 == 0 else flows[::-1])
    ]


def measured(rows: Rows, metric: str, steps: int, stretches: int, left_out: int) -> Stretches:
    """A metric's values in each stretch of `steps` steps, the first `left_out` of each stretch apart.

    Raises:
      ValueError: a step of a stretch without a row, or without the metric.
    """
    by_step = {int(row["step"]): row for row in rows if metric in row}
    found = []
    for index in range(stretches):
        numbers = range(index * steps + left_out + 1, (index + 1) * steps + 1)
        missing = [number for number in numbers if number not in by_step]
        if missing:
            raise ValueError(
                f"measured: steps without {metric}: got none for {missing}, expected every step of "
                f"stretch {index}"
            )
        found.append([float(by_step[number][metric]) for number in numbers])
    return found


def summary(values: Stretches) -> dict[str, float]:
    """Median and quartiles over all steps, smallest and largest median of a stretch."""
    low, middle, high = np.percentile([one for stretch in values for one in stretch], [25, 50, 75])
    medians = [float(np.median(stretch)) for stretch in values]
    return {
        "median": middle,
        "quartile_low": low,
        "quartile_high": high,
        "stretch_low": min(medians),
        "stretch_high": max(medians),
    }


def ratios(values: Stretches, base: Stretches) -> dict[str, float]:
    """values / base, each stretch's median against that of its turn: the median of these ratios, the smallest
    and the largest.
    """
    each = [float(np.median(a) / np.median(b)) for a, b in zip(values, base, strict=True)]
    return {"ratio": float(np.median(each)), "low": min(each), "high": max(each)}


def implementations(start: Mapping[str, Any], fp8: bool) -> dict[str, str]:
    """Operation -> "name (reason)" of a start in `environment.json`: whatever has a name and a reason there.

    Records of FP8 operations are left out where no layer is in FP8.
    """
    found = {}

    def look(path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            return
        if {"name", "reason"} <= set(value):
            found[path] = f"{value['name']} ({value['reason']})"
            return
        for key, inner in value.items():
            look(f"{path} {key}".strip(), inner)

    for key, value in start.items():
        if fp8 or not key.startswith("fp8_"):
            look(key, value)
    return found


def settings(directory: Path, flow: str, steps: int, overrides: Sequence[str]) -> list[str]:
    """The overrides of a flow's run."""
    suffix = next((suffix for suffix in EXACT if flow.endswith(suffix)), "")
    exact = [f"numerics.exact={EXACT[suffix]}"] if suffix else []
    length = [
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        f"run.directory={directory}",
        f"run.steps={steps}",
    ]
    return [*overrides, f"precision.preset={flow.removesuffix(suffix)}", *exact, *length]


def train(config: Path, sets: Sequence[str], directory: Path) -> None:
    """Runs a flow, or goes on with it. Raises RunStopped where it fails; it has said why."""
    command = [
        sys.executable,
        "-m",
        "jetrl_jax.train",
        "--config",
        str(config),
        *(word for one in sets for word in ("--set", one)),
    ]
    done = subprocess.run(
        [*command, *(["--resume"] if directory.exists() else [])], stdout=subprocess.DEVNULL, cwd=ROOT
    )
    if done.returncode:
        raise RunStopped(f"train_flows: the run in {directory} ended with status {done.returncode}.")


def report(out: Path, flows: Sequence[str], steps: int, stretches: int, left_out: int) -> dict[str, Any]:
    """What the runs left behind, as one record."""
    found: dict[str, Any] = {}
    values: dict[str, dict[str, Stretches]] = {}
    for flow in flows:
        directory = out / flow
        starts = json.loads((directory / ENVIRONMENT_FILE).read_text(encoding="utf-8"))["starts"]
        fp8 = " fp8 " in (directory / PRECISION_FILE).read_text(encoding="utf-8")
        rows = read_metrics(directory / METRICS_FILE)
        values[flow] = {
            name: measured(rows, metric, steps, stretches, left_out) for name, metric in METRICS.items()
        }
        found[flow] = {
            "implementations": implementations(starts[-1], fp8),
            "device": starts[-1]["device_kind"],
            "packages": starts[-1]["packages"],
            "commit": starts[-1]["commit"],
            "figures": {name: summary(stretches) for name, stretches in values[flow].items()},
            "stretches": values[flow],
            "largest_difference": max(row[MISMATCH] for row in rows if MISMATCH in row),
        }
    base = flows[-1]
    against = {
        flow: {name: ratios(values[flow][name], values[base][name]) for name in METRICS}
        for flow in flows[:-1]
    }
    return {
        "steps": steps,
        "stretches": stretches,
        "left_out": left_out,
        "base": base,
        "flows": found,
        "against_base": against,
    }


def table(record: Mapping[str, Any]) -> str:
    """Markdown: implementations of each flow, then figures, then ratios."""
    lines = []
    for name, flow in record["flows"].items():
        lines += [
            f"{name} on {flow['device']}:",
            *(f"    {what}: {text}" for what, text in flow["implementations"].items()),
        ]
    lines += [
        "",
        "| flow | " + " | ".join(METRICS) + " | largest abs Δ logprob |",
        "|---|" + "---|" * (len(METRICS) + 1),
    ]
    for name, flow in record["flows"].items():
        cells = [
            f"{f['median']:.4g} ({f['quartile_low']:.4g} to {f['quartile_high']:.4g}; "
            f"stretches {f['stretch_low']:.4g} to {f['stretch_high']:.4g})"
            for f in flow["figures"].values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {flow['largest_difference']:.2g} |")
    for flow, figures in record["against_base"].items():
        cells = [
            f"{name} x {r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for name, r in figures.items()
        ]
        lines += ["", f"{flow} against {record['base']}, stretch by stretch: " + "; ".join(cells)]
    return "\n".join(lines)


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; the config of every flow is read, so that a mistake is found before the first run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "qwen3_100m_gpu.yaml")
    parser.add_argument(
        "--flows", nargs="+", default=["fp8_unified", "bf16"], help="the last one is the base of the ratios"
    )
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="RL steps of a stretch")
    parser.add_argument(
        "--left-out", type=int, default=2, help="first steps of a stretch that are not counted"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="as in jetrl_jax.train, for every flow"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks/train_flows"), help="directory, new or empty"
    )
    arguments = parser.parse_args(argv)
    if (
        len(set(arguments.flows)) != len(arguments.flows)
        or not 0 <= arguments.left_out < arguments.steps
        or arguments.stretches < 1
    ):
        parser.error(
            "expected different flows, --stretches of at least 1 and --left-out from 0 to below --steps"
        )
    arguments.out = arguments.out.resolve()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(
            f"--out is not empty: got {arguments.out}, and runs of another measurement would be resumed"
        )
    for flow in arguments.flows:
        load_config(arguments.config, settings(arguments.out / flow, flow, arguments.steps, arguments.set))
    return arguments


def main(argv: Sequence[str]) -> int:
    """Runs what is asked for, prints the table, writes `train_flows.json`."""
    arguments = options(argv)
    out: Path = arguments.out
    done: list[str] = []
    for index, flow in turns(arguments.flows, arguments.stretches):
        print(f"stretch {index + 1} of {arguments.stretches}: {flow}", flush=True)
        sets = settings(out / flow, flow, (index + 1) * arguments.steps, arguments.set)
        train(arguments.config.resolve(), sets, out / flow)
        if index + 1 < arguments.stretches:
            continue
        done = [name for name in arguments.flows if name == flow or name in done]
        # After every flow: what was measured outlives the time that there is for it.
        record = report(out, done, arguments.steps, arguments.stretches, arguments.left_out)
        record |= {"command": sys.argv, "config": str(arguments.config)}
        (out / "train_flows.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(table(record))
    return 0


if __name__ == "__main__":
    run_entry_point(main)
