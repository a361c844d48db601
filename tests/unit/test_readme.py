"""The README says what is there: its file tree is complete, its Python runs, its commands name what exists."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jetrl_jax.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    """Bodies of the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def load_file_tree() -> ModuleType:
    """`.ci/file_tree.py` as a module."""
    spec = importlib.util.spec_from_file_location("file_tree", ROOT / ".ci" / "file_tree.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


file_tree = load_file_tree()


def test_file_tree_names_every_file_with_a_comment() -> None:
    entries = file_tree.parse(file_tree.FENCE.search(README).group(1))
    listed, files = {path for path in entries if not path.endswith("/")}, file_tree.repository_files()
    assert not files - listed, f"not in the README's file tree (`make tree` adds them): {sorted(files - listed)}"
    assert not listed - files, f"in the README's file tree, but not in the repository: {sorted(listed - files)}"
    bare = [path for path, comment in entries.items() if comment in ("", "?")]
    assert not bare, f"entries of the README's file tree without a comment: {bare}"


def test_file_tree_reads_what_it_draws() -> None:
    comments = {"a/": "first", "a/b/": "second", "a/b/c.py": "third", "a/d.yaml": "fourth", "e.md": "fifth"}
    drawn = file_tree.draw({"a/b/c.py", "a/d.yaml", "e.md"}, comments)
    assert file_tree.parse(drawn) == comments
    assert [line.split()[0] for line in drawn.splitlines()] == ["a/", "b/", "c.py", "d.yaml", "e.md"]
    assert "?" in file_tree.draw({"new.yaml"}, comments)


@pytest.mark.parametrize("index", range(len(code_blocks(README, "python"))))
def test_python_of_the_readme_runs(index: int, tmp_path: Path) -> None:
    """Each block runs alone, in a directory that holds nothing but the configs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    program = tmp_path / "block.py"
    program.write_text(code_blocks(README, "python")[index], encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_readme_exist() -> None:
    """`make` targets, modules started with -m and configs that the README names."""
    shell = "\n".join(code_blocks(README, "bash")) + "\n".join(re.findall(r"`([^`\n]+)`", README))
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z0-9-]+)", shell)) <= targets
    assert set(re.findall(r"-m jetrl_jax ([a-z_-]+)", shell)) <= set(COMMANDS)
    modules = set(re.findall(r"-m ((?:jetrl_jax|pallas_kernels|bridge)\.[\w.]+)", shell))
    assert {module for module in modules if not (ROOT / (module.replace(".", "/") + ".py")).is_file()} == set()
    assert {path for path in re.findall(r"\bconfigs/[\w.-]+\.yaml", shell) if not (ROOT / path).is_file()} == set()
