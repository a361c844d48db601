"""What holds for every test: the CPU unless told otherwise, no network, strict JAX types, the axes in
signatures, a reason for every skip, and a limit of time.

Compiled programs are kept over sessions in `.cache/jax-tests`, by the versions and the processor that they
were made for. A test's cost is the processor time of its process and of those that it started and waited for:
workers share the cores, and clocks on the wall count the neighbour too.  (Waiting costs nothing so;
pytest's own list of durations has it.)
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# A session holds a million objects of the packages that it imports; by default a quarter of its time went
# into looking for cycles among them while JAX traces.
gc.set_threshold(50_000, 20, 50)

COMPILED = Path(__file__).resolve().parents[1] / ".cache" / "jax-tests"
COMPILED_BYTES = 3 * 2**30  # of all programs that are kept; more than that, and all are made again


def processor_features() -> str:
    """Names of the instructions that the CPU has; its name where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def compilation_cache() -> Path:
    """Where this session's programs are kept: emptied where it has grown too large or a session was killed
    while it wrote.
    """
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    told = [
        f"{name}={os.environ.get(name, '')}"
        for name in ("XLA_FLAGS", "JETRL_TEST_ISA", "JAX_PLATFORMS", "JAX_ENABLE_X64")
    ]
    key = "\n".join([platform.python_version(), processor_features(), *versions, *told])
    folder, sessions = COMPILED / hashlib.sha256(key.encode()).hexdigest()[:16], COMPILED / "sessions"
    COMPILED.mkdir(parents=True, exist_ok=True)
    with open(COMPILED / "lock", "w") as lock:  # of sessions that start at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        sessions.mkdir(exist_ok=True)
        marks = list(sessions.iterdir())
        living = [mark for mark in marks if Path(f"/proc/{mark.name}").exists()]
        size = sum(file.stat().st_size for file in COMPILED.glob("*/*-cache"))
        if not living and (marks or size > COMPILED_BYTES):
            for old in (path for path in COMPILED.iterdir() if path.is_dir()):
                shutil.rmtree(old)
        for made in (folder, sessions):
            made.mkdir(exist_ok=True)
        mark = sessions / str(os.getpid())
        mark.touch()
    atexit.register(mark.unlink, missing_ok=True)
    return folder


# a worker of pytest-xdist has it from the session's first process
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compilation_cache())
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# several workers: threads of torch that wait for each other burn all cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import jax  # noqa: E402 (after the environment is set)
import pytest  # noqa: E402

import tests.shapes  # noqa: E402, F401 (before the packages)

# A silent promotion of bfloat16 or of a rank is how precision and shapes go wrong unseen.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes; everything else takes the first
if jax.__version_info__ >= (0, 11):
    # An interpreted kernel runs programs in as many threads as it has, which wait for each other.  Where the
    # test's own programs hold the few threads for asynchronous ones, all of them wait for ever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


QUICK_FOLDERS = ("e2e", "unit")
MOST_OPTIMIZATIONS = (
    "JAX_DISABLE_MOST_OPTIMIZATIONS"  # "1" without them, in the processes that a test starts too
)


@pytest.fixture(scope="module", autouse=True)
def _compilation(request: pytest.FixtureRequest) -> None:
    """Programs as the product has them; quickly where nothing is claimed of the machine code: most run once or twice.

    Quickly, unless marked `as_the_product`: whole runs and unit tests.  Elsewhere: files marked `compiled_quickly`,
    but for their long tests without `long=True`.  All of `make test-avx2` compiles as the product does.
    """
    here = [item for item in request.session.items if item.path == request.path]
    long = any(item.get_closest_marker("long") for item in here)
    quickly = request.node.get_closest_marker("compiled_quickly")
    quick = (
        request.node.get_closest_marker("as_the_product") is None
        if request.path.parent.name in QUICK_FOLDERS
        else quickly is not None and (not long or quickly.kwargs.get("long", False))
    ) and "JETRL_TEST_ISA" not in os.environ
    if os.environ.get(MOST_OPTIMIZATIONS, "0") != str(int(quick)):
        os.environ[MOST_OPTIMIZATIONS] = str(int(quick))
        jax.config.update("jax_disable_most_optimizations", quick)
        jax.clear_caches()


# of processor time: the end of a session lists a test above the first; CI fails one above the second, which is
# several times what any takes, since a slower processor is no fault
LISTED_S, LIMIT_S = 10, 90
COST = pytest.StashKey[float]()


def spent_s() -> float:
    """Processor seconds so far, of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Of a skip; empty where none was given."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped").removeprefix(":").strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the file that mostly waits for a server, beside which others have the processor."""
    items.sort(key=lambda item: item.path.name != "test_vllm_server.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay to the end: the collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes what the test itself costs; fixtures that it shares are not its own."""
    start = spent_s()
    try:
        return (yield)
    finally:
        item.stash[COST] = spent_s() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Turns a skip that gives no reason, and in CI a test that costs too much, into a failure."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        if reason_of(report) in ("", "unconditional skip"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped without a reason"
    if report.when == "call":
        report.cost_s = item.stash.get(COST, 0.0)
        long = item.get_closest_marker("long") is not None
        if report.passed and not long and report.cost_s > LIMIT_S and os.environ.get("CI") == "true":
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {report.cost_s:.0f} s of processor time, expected at most "
                f"{LIMIT_S} s of a test that is not "
                "marked `long`."
            )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason of skips, and the tests that cost much; pytest's own summary of failures comes
    last.
    """
    skips = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    if skips:
        terminalreporter.section("skipped, by reason")
        for reason, count in sorted(skips.items(), key=lambda pair: (-pair[1], pair[0])):
            terminalreporter.line(f"{count:5d}  {reason}")
    reports = [
        report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])
    ]
    costs = sorted(((getattr(report, "cost_s", 0.0), report.nodeid) for report in reports), reverse=True)
    if costs and costs[0][0] > LISTED_S:
        terminalreporter.section(f"tests above {LISTED_S} s of processor time")
        for cost, name in costs:
            if cost > LISTED_S:
                terminalreporter.line(f"{cost:5.0f} s  {name}")
