"""The house rules, checked on every file: import arrows, sizes, docstrings, skip reasons, nothing of one
machine.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jetrl_jax

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jetrl_jax", "pallas_kernels", "bridge")
# These put the parts together, so they alone of jetrl_jax may import the bridge.
KNOWS_BRIDGE = ("jetrl_jax/runs/", "jetrl_jax/commands/")
INSIDE_VLLM = ("bridge/vllm/worker/", "bridge/vllm/in_process.py")  # these alone may import torch and vLLM
# the one file that asks JAX's CUDA plugin for a handler, inside a function
COUNT = "jetrl_jax/planning/count.py"
# the one file of jetrl_jax that may load transformers, inside functions
TOKENIZER = "jetrl_jax/text/tokenizer.py"
OPTIONAL = {
    "torch",
    "transformers",
    "vllm",
    "wandb",
    "datasets",
    "pyarrow",
    "pandas",
    "reasoning_gym",
    "math_verify",
}
OPTIONAL |= {"jax_triton", "triton", "httpx"}
SERVER_CLIENT = "bridge/vllm/client.py"  # the one file that may load httpx, inside functions
IMPORT_NAMES = {
    "orbax-checkpoint": "orbax",
    "pyyaml": "yaml",
    "ml-dtypes": "ml_dtypes",
    "tensorboardx": "tensorboardX",
}
MAX_FUNCTION_LINES = 80  # docstring not counted
MAX_FILE_LINES = 700

# Written in halves, so that this file does not hold what it forbids.
FORBIDDEN = {
    "the path of one machine": re.compile(
        "|".join(("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/t" + "mp/", "/us" + "r/local"))
    ),
    "the host of a package registry": re.compile(
        "|".join(("py" + r"pi\.org", "python" + "hosted", r"\.py" + r"torch\.org", "npm" + r"js\.org"))
    ),
}


def repository_files() -> list[str]:
    """Paths of all files that git tracks or would track, relative to the root, in order."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted({path for path in listed if path and (ROOT / path).is_file()})


FILES = repository_files()
PYTHON_FILES = [path for path in FILES if path.endswith(".py")]
PACKAGE_FILES = [path for path in PYTHON_FILES if path.split("/")[0] in PACKAGES]


def read(path: str) -> str:
    """Text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def base_imports() -> set[str]:
    """Import names of the base installation, from pyproject.toml."""
    requirements = tomllib.loads(read("pyproject.toml"))["project"]["dependencies"]
    names = [re.match(r"[A-Za-z0-9._-]+", requirement).group().lower() for requirement in requirements]
    # parts of jax and pydantic
    return {IMPORT_NAMES.get(name, name) for name in names} | {"jaxlib", "pydantic_core"}


# --------------------------------------------------------------------------------------------------------------- arrows


def imports_of(source: str) -> Iterator[tuple[str, bool, int]]:
    """(imported root package, whether at module level, line) of every import that runs; TYPE_CHECKING blocks
    do not.
    """

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name.split(".")[0], top, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield (child.module or "").split(".")[0], top, child.lineno
            yield from walk(
                child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            )

    yield from walk(ast.parse(source), True)


def allowed_imports(path: str) -> tuple[set[str], set[str]]:
    """What a file may import at module level, and what only inside functions."""
    package, name = path.split("/")[0], Path(path).name
    base = base_imports()
    if package == "pallas_kernels":
        lazy = {"jax_triton", "triton"} if "triton" in name else set()
        return {"jax", "jaxtyping", "numpy", "ml_dtypes", "pallas_kernels"}, lazy
    if package == "jetrl_jax":
        lazy = OPTIONAL - {"torch", "transformers", "vllm", "jax_triton", "triton", "httpx"}
        lazy |= {"transformers"} if path == TOKENIZER else set()
        lazy |= {"jax_cuda13_plugin"} if path == COUNT else set()
        return base | {"jetrl_jax", "pallas_kernels"} | (
            {"bridge"} if path.startswith(KNOWS_BRIDGE) else set()
        ), lazy
    own = {"torch", "vllm", "prometheus_client"} if path.startswith(INSIDE_VLLM) else set()  # vLLM's own
    return base | set(PACKAGES) | own, {"httpx"} if path == SERVER_CLIENT else set()


def arrow_problems(path: str, source: str) -> list[str]:
    """Every import of a file that its place in the house forbids."""
    top_level, lazy = allowed_imports(path)
    problems = []
    for root, top, line in imports_of(source):
        if root in sys.stdlib_module_names or root in top_level or (root in lazy and not top):
            continue
        problems.append(f"{path}:{line}: imports {root} {'at module level' if top else 'inside a function'}")
    return problems


def test_imports_follow_the_arrows() -> None:
    problems = [problem for path in PACKAGE_FILES for problem in arrow_problems(path, read(path))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/formats.py", "import flax"),
        ("pallas_kernels/gemm/api.py", "from jetrl_jax.precision import plan as precision"),
        ("jetrl_jax/rl/losses.py", "def f():\n    import bridge.hf.names"),
        ("jetrl_jax/rl/losses.py", "def f():\n    import torch"),
        ("jetrl_jax/text/tokenizer.py", "import transformers"),
        ("jetrl_jax/tasks/jsonl.py", "try:\n    import pyarrow\nexcept ImportError:\n    pass"),
        ("bridge/hf/read.py", "import torch"),
        ("jetrl_jax/train.py", "import bridge.hf.read"),
        ("bridge/vllm/server.py", "import torch"),
        ("bridge/hf/read.py", "def f():\n    import vllm"),
        ("bridge/vllm/client.py", "import httpx"),
        ("bridge/vllm/server.py", "def f():\n    import httpx"),
    ],
)
def test_arrow_check_finds_forbidden_imports(path: str, source: str) -> None:
    assert arrow_problems(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jetrl_jax/runs/policy.py", "import bridge.hf.read"),
        ("jetrl_jax/text/tokenizer.py", "def f():\n    import transformers"),
        ("jetrl_jax/rl/losses.py", "if TYPE_CHECKING:\n    import torch"),
        ("bridge/vllm/worker/engine.py", "import torch, vllm"),
    ],
)
def test_arrow_check_lets_allowed_imports_pass(path: str, source: str) -> None:
    assert not arrow_problems(path, source)


def test_packages_import_without_extras_and_without_touching_a_device() -> None:
    """Each module of the base installation imports where every optional library is missing, and starts no JAX
    backend.
    """
    modules = [path[:-3].replace("/", ".").removesuffix(".__init__") for path in PACKAGE_FILES]
    modules = [
        module
        for module in modules
        if not re.search(r"bridge\.vllm\.(worker|in_process)|triton|__main__", module)
    ]
    program = f"""
        import importlib, sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {sorted(OPTIONAL)!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)
        sys.meta_path.insert(0, Missing())
        for module in {modules!r}:
            importlib.import_module(module)
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized(), "importing the packages started a JAX backend"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_of_the_package_resolves() -> None:
    found = {name: getattr(jetrl_jax, name).__name__.rsplit(".", 1)[-1] for name in jetrl_jax.__all__}
    assert found == {name: name for name in jetrl_jax.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Decoderr'"):
        jetrl_jax.Decoderr  # noqa: B018


# ----------------------------------------------------------------------------------------------------- sizes,
# docstrings


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a module, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function, clean=False) is not None
    return (
        function.end_lineno
        - function.lineno
        + 1
        - (first.end_lineno - first.lineno + 1 if is_docstring else 0)
    )


def size_problems(path: str, source: str) -> list[str]:
    """A file or function that is too long to be read in one go."""
    problems = [
        f"{path}:{function.lineno}: {function.name} has {code_lines(function)} lines, expected at most "
        f"{MAX_FUNCTION_LINES}"
        for function in functions_of(ast.parse(source))
        if code_lines(function) > MAX_FUNCTION_LINES
    ]
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        problems.append(f"{path}: {lines} lines, expected at most {MAX_FILE_LINES}")
    return problems


def docstring_problems(path: str, source: str, public: bool) -> list[str]:
    """A module without a docstring and, where `public`, each public function, class or method without one."""
    tree = ast.parse(source)
    problems = [] if ast.get_docstring(tree) or not source.strip() else [f"{path}: no module docstring"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ) or node.name.startswith("_"):
                continue
            overload = any(
                "overload" in ast.unparse(decorator) or ".setter" in ast.unparse(decorator)
                for decorator in node.decorator_list
            )
            if not ast.get_docstring(node) and not overload:
                problems.append(f"{path}:{node.lineno}: {prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    if public:
        visit(tree.body, "")
    return problems


def test_files_and_functions_are_short_enough_to_read() -> None:
    problems = [problem for path in PYTHON_FILES for problem in size_problems(path, read(path))]
    assert not problems, "\n".join(problems)


def test_public_things_have_docstrings() -> None:
    problems = [
        problem
        for path in PYTHON_FILES
        for problem in docstring_problems(path, read(path), path in PACKAGE_FILES)
    ]
    assert not problems, "\n".join(problems)


def test_size_and_docstring_checks_find_what_they_look_for() -> None:
    long = "def f():\n    '''Doc.'''\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    assert size_problems("a.py", long)
    assert not size_problems("a.py", long.replace("    x = 1\n", "", 1))
    assert size_problems("a.py", "\n" * (MAX_FILE_LINES + 1))
    assert (
        len(docstring_problems("a.py", "class A:\n    def f(self): ...\n    def _g(self): ...\n", True)) == 3
    )


# --------------------------------------------------------------------------------------------------------
# skips, machines


def skip_problems(path: str, source: str) -> list[str]:
    """Calls that skip a test without a word."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.skip":
            problems.append(
                f"{path}:{node.lineno}: pytest.mark.skip: use skipif with a condition and a reason"
            )
        if not isinstance(node, ast.Call):
            continue
        called, keywords = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        silent = called == "pytest.skip" and not node.args and "reason" not in keywords
        if silent or (called in ("pytest.mark.skipif", "pytest.importorskip") and "reason" not in keywords):
            problems.append(f"{path}:{node.lineno}: {called} without a reason")
    return problems


def test_every_skip_gives_a_reason() -> None:
    problems = [
        problem
        for path in PYTHON_FILES
        if path.startswith("tests/")
        for problem in skip_problems(path, read(path))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "source",
    [
        "pytest.importorskip('torch')",
        "@pytest.mark.skip\ndef f(): ...",
        "pytest.skip()",
        "pytest.mark.skipif(True)",
    ],
)
def test_skip_check_finds_silent_skips(source: str) -> None:
    assert skip_problems("a.py", source)


def test_nothing_names_one_machine_or_a_package_registry() -> None:
    problems = []
    for path in FILES:
        text = (ROOT / path).read_bytes().decode("utf-8", errors="replace")
        for what, pattern in FORBIDDEN.items():
            problems += [f"{path}: {what}: {match.group()!r}" for match in pattern.finditer(text)]
    assert not problems, "\n".join(problems)


def test_test_files_have_unique_names() -> None:
    names = [
        Path(path).name
        for path in PYTHON_FILES
        if path.startswith("tests/") and Path(path).name.startswith("test_")
    ]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


# --------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("python", "without"),
    [
        ("311", {"jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-triton", "triton"}),
        ("312", {"torch", "gguf", "accelerate", "peft"}),
    ],
)
def test_constraints_pin_everything_that_is_installed(python: str, without: set[str]) -> None:
    """Each requirement of the extras that CI installs has one exact version for each Python that CI runs."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        "setuptools",
        *(line for name in ("hf", "tasks", "torch", "real", "wandb", "dev", "aot") for line in extras[name]),
    ]
    wanted_names = {re.match(r"[A-Za-z0-9._-]+", line).group().lower().replace("_", "-") for line in wanted}
    lines = [
        line
        for line in read(f".ci/constraints-py{python}.txt").splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = {line.split("==")[0] for line in lines}
    assert wanted_names - pinned == without
    assert not pinned & ({"torchvision"} | without)
