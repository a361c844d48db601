"""Time a GRPO step and a rollout of our trainer, TRL's and Tunix's, in alternation: ``make bench-peers``.

Each contender is a process of its own, built and warmed up before the first measurement, that sleeps while
another one runs.  A round gives every contender one burst of steps and one of rollouts, in a new random
order, so that all see the same states of the machine.  Reported are the medians over the rounds with the
quartiles, and for each ratio to our trainer the 95 % bootstrap interval of the ratio of medians, rounds
resampled in pairs.  A ratio counts only where that interval excludes 1.

Of the setting `real` (a pretrained model) the rates of rollout and training are those of the steps' own
parts (`--rollouts 0`), and `torch` is transformers' generate with a plain training step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WORKER_OF_OURS = (HERE / "worker_jetrl.py").relative_to(ROOT)
RESAMPLES = 10_000
VECTOR_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
HUGE_PAGES = "glibc.malloc.hugetlb=1"
PAUSE_S = 0.3  # lets the spinning threads of the previous contender go to sleep


@dataclass
class Contender:
    """A worker process and what was measured of it."""

    name: str
    process: subprocess.Popen[str]
    about: dict[str, Any] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    train_tokens_per_s: list[float] = field(default_factory=list)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for a message of the worker."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"compare: {self.name} ended with status {self.process.wait()}; its messages stand above"
            )
        return json.loads(line)


def start(
    name: str, pythons: dict[str, str], checkouts: dict[str, Path], setting: str, quiet: bool
) -> Contender:
    """Start the worker of a contender such as `trl:float32`, of `trl:float32+pages` in huge pages, or of
    `NAME:bf16` of another checkout of ours.
    """
    library, _, kind = name.partition(":")
    flavor, _, pages = kind.partition("+")
    if pages not in ("", "pages"):
        raise ValueError(
            f"compare: got the contender {name!r}, expected LIBRARY:FLAVOR or LIBRARY:FLAVOR+pages"
        )
    root = checkouts.get(library)
    worker = HERE / f"worker_{library}.py" if root is None else root / WORKER_OF_OURS
    environment = dict(os.environ)
    if root is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    if pages:
        environment["GLIBC_TUNABLES"] = HUGE_PAGES
    command = [pythons.get(library, sys.executable), str(worker), "--setting", setting, "--flavor", flavor]
    errors = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    contender = Contender(name, process)
    contender.about = contender.answer()
    return contender


def measure(
    contenders: list[Contender], rounds: int, burst: int, rollouts: int, warmup: int, seed: int = 0
) -> None:
    """Warm every contender up, then give each one burst of steps and one of rollouts per round.

    rollouts: 0 takes the rate of the steps' own rollouts.
    """
    for contender in contenders:
        contender.ask(command="steps", count=warmup)
        if rollouts:
            contender.ask(command="decode", count=2)
    shuffle = random.Random(seed)
    for index in range(rounds):
        for contender in shuffle.sample(contenders, len(contenders)):
            time.sleep(PAUSE_S)
            steps = contender.ask(command="steps", count=burst)
            contender.step_s.append(steps["seconds"] / steps["steps"])
            if rollouts:
                decode = contender.ask(command="decode", count=rollouts)
                contender.tokens_per_s.append(decode["tokens"] / decode["seconds"])
            elif "rollout_tokens_per_s" in steps:
                contender.tokens_per_s.append(steps["rollout_tokens_per_s"])
                contender.train_tokens_per_s.append(steps["train_tokens_per_s"])
        line = "  ".join(f"{contender.name} {1e3 * contender.step_s[-1]:.0f}" for contender in contenders)
        print(f"round {index + 1}/{rounds}, ms a step: {line}", flush=True)


def ratio_interval(
    numerator: list[float], denominator: list[float], seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % bootstrap interval, the pairs (rounds) resampled together."""
    pairs = np.array([numerator, denominator])
    rows = np.random.default_rng(seed).integers(0, pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    medians = np.median(pairs[:, rows], axis=2)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    center = np.median(pairs, axis=1)
    return float(center[0] / center[1]), float(low), float(high)


def verdict(ratio: tuple[float, float, float]) -> str:
    """The ratio with its interval; a ratio whose interval holds 1 is no difference."""
    center, low, high = ratio
    text = f"{center:.2f} [{low:.2f}, {high:.2f}]"
    return text if low > 1 or high < 1 else f"{text} (no difference)"


def quartiles(values: list[float], scale: float, digits: int) -> str:
    """Median and quartiles as text."""
    low, middle, high = np.quantile(np.array(values) * scale, [0.25, 0.5, 0.75])
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def markdown(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, the first one as its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def add_rounds(contenders: list[Contender], path: Path) -> None:
    """Add the rounds of an earlier run of the same contenders."""
    numbers = json.loads(path.read_text())["numbers"]
    if missing := [contender.name for contender in contenders if contender.name not in numbers]:
        raise SystemExit(f"compare: {path} lacks {', '.join(missing)}: got {', '.join(numbers)}")
    for contender in contenders:
        for name in ("step_s", "tokens_per_s", "train_tokens_per_s"):
            getattr(contender, name).extend(numbers[contender.name].get(name, []))


def tables(contenders: list[Contender]) -> str:
    """What each contender took, and how much longer the others took than each flavor of ours."""
    kinds = {
        "ms a step": ("step_s", 1e3, 0),
        "rollout tokens/s": ("tokens_per_s", 1, 0),
        "train tokens/s": ("train_tokens_per_s", 1, 0),
    }
    kinds = {title: kind for title, kind in kinds.items() if any(getattr(c, kind[0]) for c in contenders)}
    times = [["", *(f"{title}: median (quartiles)" for title in kinds)]]
    for contender in contenders:
        measured = [(getattr(contender, name), scale, digits) for name, scale, digits in kinds.values()]
        times.append([contender.name, *(quartiles(*one) if one[0] else "" for one in measured)])
    ours = [contender for contender in contenders if contender.name.startswith("jetrl")]
    found = [times]
    for title, (name, *_) in kinds.items():
        peers = [peer for peer in contenders if peer not in ours and getattr(peer, name)]
        head = "time of a step, theirs / ours" if name == "step_s" else f"{title}, ours / theirs"
        rows = [[head, *(peer.name for peer in peers)]]
        for base in ours:
            pairs = [(getattr(base, name), getattr(peer, name)) for peer in peers]
            turned = [pair[::-1] if name == "step_s" else pair for pair in pairs]
            rows.append([base.name, *(verdict(ratio_interval(*pair)) for pair in turned)])
        found.append(rows)
    return "\n\n".join(markdown(rows) for rows in found if len(rows) > 1 and len(rows[0]) > 1)


def machine() -> dict[str, Any]:
    """What the numbers were measured on; `isa`: the instruction set to which all libraries were forced
    (`tests/instruction_set`).
    """
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(
        reversed([(key.strip(), value.strip()) for key, _, value in (x.partition(":") for x in cpuinfo)])
    )
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "family": f"{fields.get('cpu family')}, model {fields.get('model')}",
        "flags": [flag for flag in VECTOR_FLAGS if flag in flags],
        "isa": os.environ.get("JETRL_TEST_ISA"),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "system": platform.platform(),
    }


def named(about: dict[str, Any]) -> str:
    """The machine in words."""
    forced = f", forced to {about['isa']}" if about["isa"] else ""
    return f"{about['cpu']} (family {about['family']}; {' '.join(about['flags'])}{forced}), {about['cores']} cores"


def main() -> None:
    """Run the comparison of the command line and write it beside its raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", default="tiny", help="tiny, small or real (see job.py)")
    parser.add_argument(
        "--contenders",
        nargs="+",
        required=True,
        help="library:flavor, such as trl:float32; trl:float32+pages: in huge pages",
    )
    parser.add_argument(
        "--python", nargs="*", default=[], help="library=path of the Python of its environment"
    )
    parser.add_argument(
        "--checkout",
        nargs="*",
        default=[],
        help="NAME=path of another checkout: contenders NAME:bf16 and so on",
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--burst", type=int, default=5, help="steps of a burst")
    parser.add_argument(
        "--rollouts", type=int, default=3, help="rollouts of a burst; 0: only those of its steps"
    )
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first round")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all numbers")
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="*",
        default=[],
        help="JSON files of runs whose rounds are added to these",
    )
    parser.add_argument("--verbose", action="store_true", help="show what the workers print")
    options = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in options.python)
    checkouts = {name: Path(path) for name, path in (item.split("=", 1) for item in options.checkout)}
    about = machine()
    if about["load_before"][0] > 0.5:
        print(
            f"compare: the machine is not idle (load {about['load_before'][0]:.1f}); the numbers will say so",
            file=sys.stderr,
        )
    contenders: list[Contender] = []
    try:
        for name in options.contenders:
            print(f"starting {name}", flush=True)
            contenders.append(start(name, pythons, checkouts, options.setting, not options.verbose))
        if len(counts := {contender.about["parameters"] for contender in contenders}) != 1:
            raise RuntimeError(f"compare: the models differ in size: got {counts}")
        measure(contenders, options.rounds, options.burst, options.rollouts, options.warmup)
    finally:
        for contender in contenders:
            contender.process.stdin.close()
            contender.process.wait(timeout=60)
    for path in options.earlier:
        add_rounds(contenders, path)
    text = tables(contenders)
    numbers = {
        c.name: {name: value for name, value in vars(c).items() if name not in ("name", "process")}
        for c in contenders
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": about, "options": {k: str(v) for k, v in vars(options).items()}, "numbers": numbers}
    options.out.write_text(json.dumps(record, indent=1))
    print(f"\n{options.setting}: {contenders[0].about['parameters']:,} parameters, {named(about)}\n\n{text}")
    print(
        f"\nwritten to {options.out.relative_to(ROOT) if options.out.is_relative_to(ROOT) else options.out}"
    )


if __name__ == "__main__":
    main()
