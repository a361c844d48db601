"""Where a step's time goes: processor time of each program, its floor on this machine, and its dearest operations.

    python tests/benchmarks/profile_step.py --setting tiny --flavors bf16 bf16-fast fp8_unified fp8_unified-fast

The settings are those of `make bench-peers`.  Processor time is that of the whole process, medians over the
steps, so that it also stands on a machine that other work shares; everything outside the compiled programs is
"host".  The floor is the larger of two quotients:

    floating-point operations of the products, those of each dtype / the rate of that dtype
    bytes of arguments, results and temporaries, once each / the rate of a copy

of all calls of a step, decode's for each token, with rates that are measured first: products of two
1,500 x 1,500 matrices and a copy of 64 MiB, both per second of processor time.  Operations come from JAX's
profiler, in milliseconds on the clock of the thread that runs them: their shares count, not their sum, and on
a shared machine not even these.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import resource
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import job
import numpy as np
import worker_jetrl
from compare import machine, markdown, named

from jetrl_jax import GRPOTrainer
from jetrl_jax.planning.hlo import Program
from jetrl_jax.precision.parameters import jit

SIZE, COPIED = 1500, 64 << 20
WIDTHS = {"f64": jnp.float64, "f32": jnp.float32, "bf16": jnp.bfloat16}
Parts = dict[str, list[float]]


def processor_s() -> float:
    """Processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rates() -> dict[str, float]:
    """Operations a second of products by the dtype of their operands, and bytes a second of a copy."""
    found = {}
    with jax.enable_x64(True):
        for name, dtype in WIDTHS.items():
            matrix = jnp.ones((SIZE, SIZE), dtype)
            product = jit(
                lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
            )
            found[name] = 2 * SIZE**3 / _fastest(lambda product=product, matrix=matrix: product(matrix))
    source = np.ones(COPIED, np.uint8)
    target = np.empty_like(source)
    found["bytes"] = 2 * COPIED / _fastest(lambda: np.copyto(target, source))
    return found


def _fastest(call: Callable[[], Any], tries: int = 5) -> float:
    """The least processor seconds of some calls after the first."""
    jax.block_until_ready(call())
    spent = []
    for _ in range(tries):
        start = processor_s()
        jax.block_until_ready(call())
        spent.append(processor_s() - start)
    return max(min(spent), 1e-9)


class Profile:
    """A contender of `make bench-peers` whose programs are timed one by one."""

    def __init__(self, setting: str, flavor: str) -> None:
        sizes = job.SETTINGS[setting]
        drawn = job.words(sizes)
        records = [
            {"prompt": job.prompt_of(word), "answer": word[::-1]}
            for word, _ in zip(drawn, range(1024), strict=False)
        ]
        config = worker_jetrl.build_config(sizes, flavor)
        run = GRPOTrainer(
            config,
            tokenizer=worker_jetrl.JobTokenizer(sizes),
            dataset=records,
            reward_functions=[worker_jetrl.reward],
        )
        programs, engine = run.parts.programs, run.parts.new_engine()
        self.take = run.parts.new_step(
            engine, run.parts.new_rewards(), programs.init(run.policy.params), None
        )
        self.spent: Parts = defaultdict(list)
        self.take(1)
        for name in ("_policy_gradient", "_check", "_update"):
            setattr(programs, name, self._timed(name.strip("_"), getattr(programs, name)))
        kept = engine.programs._compiled
        for key in list(kept):
            kept[key] = self._timed(key[0], kept[key])
        self.take(2)

    def _timed(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = processor_s()
            result = jax.block_until_ready(program(*args, **kwargs))
            self.spent[name].append(processor_s() - start)
            return result

        return call

    def steps(self, count: int) -> Parts:
        """Processor seconds of each program in each of `count` steps, and of the whole step."""
        found: Parts = defaultdict(list)
        for step in range(count):
            self.spent.clear()
            start = processor_s()
            self.take(3 + step)
            found["step"].append(processor_s() - start)
            for name, calls in self.spent.items():
                found[name].append(sum(calls))
            found["host"].append(found["step"][-1] - sum(map(sum, self.spent.values())))
        return found


def modules(earlier: Collection[str] = ()) -> dict[str, Any]:
    """The loaded programs: (text, executable), by the name of the module.

    earlier: texts of programs of flavors before, some of which stay loaded.
    """
    return {
        module.name: (text, executable)
        for executable in jax.devices()[0].client.live_executables()
        for module in executable.hlo_modules()
        if (text := module.to_string()) not in earlier
    }


def floor(name: str, loaded: tuple[str, Any], measured: dict[str, float], turns: int) -> str:
    """The floor of a program in milliseconds, and what it is made of.

    turns: of the loop of a program, whose number XLA does not know.
    """
    text, executable = loaded
    memory = executable.get_compiled_memory_stats()
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    products: Counter[str] = Counter()
    for launch in Program(text).launches():
        for dtype, operations in launch.dots:
            products[dtype] += turns * launch.times * operations / measured[dtype]
    parts = {"memory": turns * moved / measured["bytes"]} | products
    told = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in parts.items())
    return f"{name} {1e3 * max(parts['memory'], sum(products.values())):.1f} ms ({told})"


def operations(profile: Profile, count: int) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """(module, [(operation, milliseconds a step)]) of a trace, dearest first."""
    folder = tempfile.mkdtemp()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for step in range(count):
            profile.take(100 + step)
    (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        for line in plane.lines:
            for event in line.events:
                told = dict(event.stats)
                if "hlo_op" in told:
                    found[told["hlo_module"]][told["hlo_op"]] += event.duration_ns
    texts = modules()
    for module, spent in sorted(found.items(), key=lambda item: -item[1].total()):
        text = texts[module][0] if module in texts else ""
        groups: Counter[str] = Counter()
        for name, nanoseconds in spent.items():
            groups[_described(name, text)] += nanoseconds
        yield module, [(name, value / 1e6 / count) for name, value in groups.most_common(8)]


def _described(name: str, text: str) -> str:
    """An operation's kind, result and place in the traced function."""
    line = re.search(rf"^\s*(?:ROOT )?%?{re.escape(name)} = (\S+) .*$", text, re.MULTILINE)
    place = re.search(r'op_name="([^"]*)"', line[0]) if line else None
    kind = re.sub(r"[.\d]+$", "", name)
    return f"{kind} {line[1].split('{')[0] if line else ''} {place[1].rsplit('/', 1)[-1] if place else ''}".strip()


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setting", choices=sorted(job.SETTINGS), default="tiny")
    parser.add_argument("--flavors", nargs="+", default=["bf16", "bf16-fast"], help="as of make bench-peers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--operations", action="store_true", help="also the dearest operations of each program"
    )
    options = parser.parse_args()
    about, measured = machine(), rates()
    print(f"{options.setting}, {named(about)}, load {about['load_before'][0]:.1f}")
    print(", ".join(f"{name} {rate / 1e9:.0f} G/s" for name, rate in measured.items()), flush=True)
    names = ("prefill", "insert", "decode", "policy_gradient", "check", "update", "host", "step")
    rows = [["processor ms a step", *names]]
    earlier: set[str] = set()
    for flavor in options.flavors:
        profile = Profile(options.setting, flavor)
        spent = profile.steps(options.steps)
        rows.append([flavor, *(f"{1e3 * float(np.median(spent[name])):.1f}" for name in names)])
        turns = {
            "prefill": 1,
            "decode": job.SETTINGS[options.setting].completion_tokens - 1,
            "policy_gradient": 1,
        }
        loaded = modules(earlier)
        named_in = {
            name: f"jit_{name}" if name == "policy_gradient" else f"jit__{name}_program" for name in turns
        }
        found = [floor(name, loaded[named_in[name]], measured, count) for name, count in turns.items()]
        print(flavor, "floors:", "; ".join(found), flush=True)
        earlier |= {text for text, _ in loaded.values()}
        if options.operations:
            for module, dearest in operations(profile, 3):
                print(f"  {module}: " + "; ".join(f"{name} {value:.1f}" for name, value in dearest))
        del profile
        jax.clear_caches()
    print("\n" + markdown(rows))


if __name__ == "__main__":
    main()
