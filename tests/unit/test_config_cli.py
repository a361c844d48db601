"""How a command ends: exit status and message, before jax is imported and before any directory is made."""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_jax.commands.entry import add_config_arguments, run_entry_point
from jetrl_jax.errors import RunStopped, UserError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
    "PYTHONPATH": str(ROOT)
}
ENTRY_POINT = """
import argparse, sys
from jetrl_jax.commands.entry import add_config_arguments, config_from_arguments, run_entry_point
from jetrl_jax.errors import UserError

def main(argv):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    config = config_from_arguments(parser.parse_args(argv))
    {body}

run_entry_point(main)
"""
# importing one of them is an error
NO_JAX = "import sys\nsys.modules['jax'] = sys.modules['jaxlib'] = sys.modules['flax'] = None\n"


def run(body: str, *arguments: str, cwd: Path, preamble: str = "") -> subprocess.CompletedProcess[str]:
    """An entry point whose main does `body` after its config is read."""
    program = preamble + ENTRY_POINT.format(body=body)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )


def test_bad_config_ends_with_status_2_without_jax_and_without_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rollout:\n  group_size: 1\nrun:\n  directory: here\n")
    done = run("import jax", "--config", "run.yaml", "--set", "sed=1", cwd=tmp_path, preamble=NO_JAX)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: 2 problems in the config\n\n"
        "run.yaml:2: rollout.group_size: out of range\n"
        "  got       1\n"
        "  expected  a whole number, at least 2\n"
        "  meaning   Completions of one prompt (G); a group of one has no advantage. Default: 16.\n\n"
        "--set sed=1: sed: unknown key\n"
        "  hint      did you mean seed?\n\n"
        "Nothing was started. All fields: python -m jetrl_jax config\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_good_config_is_read_without_jax(tmp_path: Path) -> None:
    done = run("print(config.run.steps); return 7", "--set", "run.steps=3", cwd=tmp_path, preamble=NO_JAX)
    assert (done.returncode, done.stdout, done.stderr) == (7, "3\n", "")


def end(error: BaseException | int | None) -> int | str | None:
    """The status with which an entry point exits that prints a line and then raises or returns `error`."""

    def main(argv: list[str]) -> int | None:
        print("before")
        if isinstance(error, BaseException):
            raise error
        return error

    with pytest.raises(SystemExit) as caught:
        run_entry_point(main)
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "status", "stderr"),
    [
        (None, 0, ""),
        (4, 4, ""),
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (RunStopped("6 steps in a row were not finite"), 3, "stopped: 6 steps in a row were not finite\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(5), 5, ""),
    ],
)
def test_entry_point_ends_without_a_traceback(
    error: Any, status: int, stderr: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end(error) == status
    assert capfd.readouterr() == ("before\n", stderr)


@pytest.mark.parametrize("error", [ValueError("a bug"), BrokenPipeError("of a worker process")])
def test_entry_point_lets_a_bug_through(error: Exception) -> None:
    with pytest.raises(type(error)):
        end(error)


@pytest.mark.parametrize(
    "body", ["[print('x' * 100) for _ in range(10000)]", "print('x'); raise UserError('late')"]
)
def test_entry_point_is_quiet_when_nobody_reads(body: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    program = ENTRY_POINT.format(body=f"sys.stdin.read(); {body}")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    os.close(writer)
    os.close(reader)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) in ((141, b""), (2, b"error: late\n"))
    assert (process.returncode == 2) == ("late" in body)


def test_unknown_argument_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--cfg", "a"])
    assert "unrecognized arguments: --cfg" in capsys.readouterr().err


def test_package_offers_its_names_lazily(tmp_path: Path) -> None:
    program = """
import sys, jetrl_jax
assert set(jetrl_jax.__all__) <= set(dir(jetrl_jax)), dir(jetrl_jax)
assert [name for name in sys.modules if name.startswith("jetrl_jax.")] == [], "importing the package imports its parts"
from jetrl_jax import RunConfig, load_config
assert load_config(None) == RunConfig()
assert "jax" not in sys.modules and "yaml" in sys.modules
try:
    jetrl_jax.load_confg
except AttributeError as error:
    assert "load_config" in str(error)
else:
    raise AssertionError("an unknown name was found")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr


def test_package_version_is_that_of_the_distribution() -> None:
    import tomllib

    import jetrl_jax

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == jetrl_jax.__version__


@pytest.mark.parametrize(
    "name",
    ["Decoder", "GRPOTrainer", "ModelConfig", "PrecisionPlan", "RunConfig", "load_config", "load_policy"],
)
def test_public_name_can_be_imported(name: str) -> None:
    import jetrl_jax

    assert getattr(jetrl_jax, name).__name__ == name


COMMANDS = [
    ["jetrl_jax.train", "--resume"],
    ["jetrl_jax.commands.plan", "--devices", "1x80GiB"],
    ["jetrl_jax.commands.evaluate", "--checkpoint", "RUN"],
    ["jetrl_jax.commands.generate", "--checkpoint", "RUN", "--prompt", "a"],
    ["jetrl_jax.commands.mismatch", "--checkpoint", "RUN"],
    ["jetrl_jax.commands.check_engine"],
    ["jetrl_jax.commands.export", "--run", "RUN", "--out", "out"],
    ["jetrl_jax.commands.parity", "--run", "RUN"],
]


def test_every_command_reads_its_config_before_jax(tmp_path: Path) -> None:
    """Of a run directory, and of a Hugging Face directory; an import of JAX would be an error, and no
    message.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    calls = [
        [word.replace("RUN", folder) for word in command] for command in COMMANDS for folder in ("run", "hf")
    ]
    program = f"""
import importlib
from jetrl_jax.errors import UserError
for module, *words in {calls!r}:
    try:
        importlib.import_module(module).main([*words, "--set", "rollout.temperature=1e-40"])
    except UserError as error:
        print(module, "rollout.temperature: out of range" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", NO_JAX + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    lines = done.stdout.splitlines()
    assert lines == [f"{call[0]} True" for call in calls] and not done.stderr, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}


def test_home_is_expanded_wherever_a_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fields of a config and in arguments, of which `--out=~/x` is left as it is by a shell."""
    from bridge.hf.read import read_config
    from jetrl_jax.commands import plan
    from jetrl_jax.config.load import load_config
    from jetrl_jax.config.types import user_path
    from jetrl_jax.runs.policy_config import is_run, policy_config

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\nmodel: {path: ~/hf}\n")
    shutil.copytree(ROOT / "configs" / "models" / "qwen3_8b", tmp_path / "hf")
    assert load_config("~/run/config.yaml").seed == 7 and is_run("~/run") and policy_config("~/run").seed == 7
    assert (
        read_config("~/hf").num_layers
        == 36
        == plan.planned_model(load_config("~/run/config.yaml")).num_layers
    )
    arguments = argparse.ArgumentParser()
    add_config_arguments(arguments)
    assert arguments.parse_args(["--config=~/run/config.yaml"]).config == tmp_path / "run" / "config.yaml"
    with pytest.raises(UserError, match=r"no such home directory: got '~nobody_of_that_name/x'"):
        user_path("~nobody_of_that_name/x")


def test_every_path_argument_expands_the_home() -> None:
    """The kind, not the instance: no argument that takes a file or directory is left a plain text."""
    found = []
    for path in sorted([*(ROOT / "jetrl_jax").rglob("*.py"), *(ROOT / "bridge").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if options.get("metavar") in ("'DIR'", "'FILE'", "'PAGE'", "'RUN'"):
                    found.append((path.name, ast.unparse(node.args[0]), options.get("type")))
    assert len(found) > 10 and {kind for _, _, kind in found} == {"user_path"}, found
