"""The Dockerfile as far as no container is needed: its sources, its pins, its command;
it is not built here.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ".ci/constraints-py312-cuda.txt"


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) in order, lines that go on joined, comments left out."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


INSTRUCTIONS = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
COPIED = [source for name, words in INSTRUCTIONS if name == "COPY" for source in words.split()[:-1]]


def pins_of(path: str) -> dict[str, str]:
    """Name -> version of a file of constraints."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def names_of(requirements: list[str]) -> set[str]:
    """Names of distributions, as constraints spell them."""
    return {re.match(r"[A-Za-z0-9._-]+", line).group().lower().replace("_", "-") for line in requirements}


def test_instructions_are_read() -> None:
    assert instructions("# no\nFROM a\nRUN b \\\n  c\n\nCOPY d e ./\n") == [
        ("FROM", "a"),
        ("RUN", "b    c"),
        ("COPY", "d e ./"),
    ]


def test_every_source_exists_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "**"
    assert {source for source in COPIED if not (ROOT / source).exists()} == set()
    assert {source for source in COPIED if f"!{source}" not in ignored} == set()
    # and nothing else does
    assert {f"!{source}" for source in COPIED} == {line for line in ignored if line.startswith("!")}


def test_everything_that_a_wheel_is_built_from_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {
        pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    files = {
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert packages | files | {"configs"} <= set(COPIED)


def test_pins_are_copied_before_they_are_installed_and_complete() -> None:
    order = [
        index for index, (name, words) in enumerate(INSTRUCTIONS) if PINS in words and name in ("COPY", "RUN")
    ]
    assert [INSTRUCTIONS[index][0] for index in order] == ["COPY", "RUN"]
    assert f"--no-deps -r {PINS}" in INSTRUCTIONS[order[1]][1]
    pins = pins_of(PINS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = names_of(
        [
            *project["dependencies"],
            *project["optional-dependencies"]["cuda"],
            "setuptools",
            "jax-cuda13-plugin",
        ]
    )
    assert wanted - pins.keys() == set()
    others = pins_of(".ci/constraints-py312.txt")
    assert {name: pins[name] for name in pins.keys() & others.keys()} == {
        name: others[name] for name in pins.keys() & others.keys()
    }
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas"} <= pins.keys()


def test_the_command_that_runs_exists() -> None:
    name, words = INSTRUCTIONS[-1]
    command = json.loads(words)
    assert name == "CMD" and command[:2] == ["python", "-m"]
    assert (ROOT / (command[2].replace(".", "/") + ".py")).is_file()
    assert command[3] == "--config" and (ROOT / command[4]).is_file()
    assert command[4].split("/")[0] in COPIED
