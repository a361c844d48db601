"""`python -m jetrl_jax COMMAND`: what it lists is there, what it does not know is one message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from jetrl_jax.__main__ import COMMANDS, main
from jetrl_jax.commands.config import shipped_configs
from jetrl_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"entry", "supervise", "__init__"}


def test_every_file_of_commands_is_one_and_has_a_main() -> None:
    files = {path.stem for path in (ROOT / "jetrl_jax" / "commands").glob("*.py")} - SHARED
    assert {name.replace("_", "-") for name in files} == set(COMMANDS)
    for name in COMMANDS:
        assert callable(import_module(f"jetrl_jax.commands.{name.replace('-', '_')}").main)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"  {name}" in [line[: 2 + len(name)] for line in lines] for name in COMMANDS)


@pytest.mark.parametrize("name", ["train", *COMMANDS])
def test_help_of_a_command_shows_an_example_of_its_own_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"jetrl_jax.commands.{name.replace('-', '_')}" if name in COMMANDS else f"jetrl_jax.{name}"
    with pytest.raises(SystemExit) as end:
        import_module(command).main(["--help"])
    options, _, examples = capsys.readouterr().out.partition("\nexample")
    lines = examples.splitlines()[1:]
    assert end.value.code == 0 and lines
    for line in lines:
        start = f"  python -m jetrl_jax{' ' if name in COMMANDS else '.'}{name} "
        assert line.startswith(start)
        assert {word for word in line.split() if word.startswith("--")} <= set(
            re.findall(r"--[a-z-]+", options)
        )
        assert all((ROOT / path).exists() for path in re.findall(r"configs/\S+", line))


def test_config_prints_each_config_of_the_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
    assert set(shipped_configs()) == set(files)
    assert main(["config", "tiny_cpu"]) == 0
    assert capsys.readouterr().out == files["tiny_cpu"].read_text()
    with pytest.raises(
        UserError, match=r"no such config: got 'tiny_gpu', expected one of .*Did you mean 'tiny_cpu'"
    ):
        main(["config", "tiny_gpu"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["evalute", "--step", "1"], "got 'evalute', .* Did you mean 'evaluate'"),
        (["train"], r"A run is trained by python -m jetrl_jax\.train"),
    ],
)
def test_unknown_command_is_one_message(argv: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(argv)


def test_the_command_ends_with_its_status_and_loads_no_jax() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for words, status in ((["no-such"], 2), (["check_engine", "--set", "run.stepz=1"], 2), (["config"], 0)):
        program = (
            "import runpy, sys; sys.modules['jax'] = None; runpy.run_module('jetrl_jax', run_name='__main__')"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
