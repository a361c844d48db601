"""The README says what is there: its file tree is complete, its Python runs, its commands name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Files that need no word in the tree.
SILENT = {"__init__.py", "py.typed", ".gitignore"}


def code_blocks(text: str, language: str) -> list[str]:
    """Bodies of the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def parse_tree(block: str) -> dict[str, str]:
    """{path: comment} of a tree drawn by two spaces of indentation, directories ending in a slash."""
    entries, stack = {}, []
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, comment = line.strip().partition(" ")
        stack = [*stack[:depth], name]
        entries["".join(stack)] = comment.strip()
    return entries


def tracked_files() -> set[str]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path for path in listed if (ROOT / path).is_file() and Path(path).name not in SILENT}


def suggestion(path: str) -> str:
    """A line for the tree: the first line of the module's docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) if path.endswith(".py") else None
    return f"{path}  {(docstring or '?').splitlines()[0]}"


def test_file_tree_names_every_file_with_a_comment() -> None:
    entries = parse_tree(code_blocks(README, "tree")[0])
    listed = {path for path in entries if not path.endswith("/")}
    missing, gone = sorted(tracked_files() - listed), sorted(listed - tracked_files())
    assert not missing, "not in the README's file tree:\n" + "\n".join(suggestion(path) for path in missing)
    assert not gone, f"in the README's file tree, but not in the repository: {gone}"
    assert not [path for path, comment in entries.items() if not comment], "an entry of the file tree without a comment"


def test_tree_parser_reads_nested_directories() -> None:
    assert parse_tree("a/    first\n  b/    second\n    c.py  third\n  d.py  fourth\ne.py\n") == {
        "a/": "first",
        "a/b/": "second",
        "a/b/c.py": "third",
        "a/d.py": "fourth",
        "e.py": "",
    }


@pytest.mark.parametrize("index", range(len(code_blocks(README, "python"))))
def test_python_of_the_readme_runs(index: int, tmp_path: Path) -> None:
    """Each block runs alone, in an empty directory."""
    program = tmp_path / "block.py"
    program.write_text(code_blocks(README, "python")[index], encoding="utf-8")
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_readme_exist() -> None:
    """`make` targets, modules started with -m and configs that the README names."""
    shell = "\n".join(code_blocks(README, "bash")) + "\n".join(re.findall(r"`([^`\n]+)`", README))
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z0-9-]+)", shell)) <= targets
    modules = set(re.findall(r"-m ((?:jetrl_jax|pallas_kernels|bridge)[\w.]*)", shell))
    assert {module for module in modules if not (ROOT / (module.replace(".", "/") + ".py")).is_file()} == set()
    assert {path for path in re.findall(r"\bconfigs/[\w.-]+\.yaml", shell) if not (ROOT / path).is_file()} == set()
