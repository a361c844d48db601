"""How a command ends: exit status and message, before jax is imported and before any directory is made."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_jax.cli import add_config_arguments, run_entry_point
from jetrl_jax.errors import RunStopped, UserError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
ENTRY_POINT = """
import argparse, sys
from jetrl_jax.cli import add_config_arguments, config_from_arguments, run_entry_point
from jetrl_jax.errors import UserError

def main(argv):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    config = config_from_arguments(parser.parse_args(argv))
    {body}

run_entry_point(main)
"""
NO_JAX = "import sys\nsys.modules['jax'] = sys.modules['jaxlib'] = sys.modules['flax'] = None\n"  # importing one of them is an error


def run(body: str, *arguments: str, cwd: Path, preamble: str = "") -> subprocess.CompletedProcess[str]:
    """An entry point whose main does `body` after its config is read."""
    program = preamble + ENTRY_POINT.format(body=body)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True, check=False, env=ENVIRONMENT
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
        "Nothing was started. All fields: python -m jetrl_jax.config_io\n"
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
def test_entry_point_ends_without_a_traceback(error: Any, status: int, stderr: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert end(error) == status
    assert capfd.readouterr() == ("before\n", stderr)


@pytest.mark.parametrize("error", [ValueError("a bug"), BrokenPipeError("of a worker process")])
def test_entry_point_lets_a_bug_through(error: Exception) -> None:
    with pytest.raises(type(error)):
        end(error)


@pytest.mark.parametrize("body", ["[print('x' * 100) for _ in range(10000)]", "print('x'); raise UserError('late')"])
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
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_package_version_is_that_of_the_distribution() -> None:
    import tomllib

    import jetrl_jax

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == jetrl_jax.__version__


@pytest.mark.parametrize("name", ["Decoder", "GRPOTrainer", "ModelConfig", "PrecisionPlan", "RunConfig", "load_config", "load_policy"])
def test_public_name_can_be_imported(name: str) -> None:
    import jetrl_jax

    assert getattr(jetrl_jax, name).__name__ == name
