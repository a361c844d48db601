"""Bring the file tree of README.md up to date: ``make tree``.

Comments that stand in the tree stay; a new Python file gets the first sentence of its docstring, any other new file
a question mark for a person to replace (a test refuses it).
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Files that need no word in the tree.
SILENT = {"__init__.py", "py.typed", ".gitignore"}
FENCE = re.compile(r"^```tree\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
COLUMN = 42
LONGEST = 110  # characters of a suggested comment


def repository_files() -> set[str]:
    """Files that git tracks or would track, those apart that need no word."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path for path in listed if (ROOT / path).is_file() and Path(path).name not in SILENT}


def parse(block: str) -> dict[str, str]:
    """{path: comment} of a tree drawn by two spaces of indentation, directories ending in a slash."""
    entries: dict[str, str] = {}
    stack: list[str] = []
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, comment = line.strip().partition(" ")
        stack = [*stack[:depth], name]
        entries["".join(stack)] = comment.strip()
    return entries


def suggested_comment(path: str) -> str:
    """First sentence of a Python file's docstring, as a phrase; a question mark for anything else."""
    if not path.endswith(".py"):
        return "?"
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or "?"
    sentence = re.split(r"(?<=\.)\s", " ".join(docstring.split("\n\n")[0].split()))[0].rstrip(".:")
    while len(sentence) > LONGEST and re.search(r"[;:,]", sentence):
        sentence = sentence[: max(sentence.rfind(mark) for mark in ";:,")]
    return sentence


def draw(files: set[str], comments: dict[str, str]) -> str:
    """The tree of `files`: directories before files, both by name."""
    entries = set(files)
    for path in files:
        entries |= {f"{parent}/" for parent in map(str, Path(path).parents) if parent != "."}
    key = {path: [(not part.endswith("/"), part) for part in re.findall(r"[^/]+/?", path)] for path in entries}
    lines = []
    for path in sorted(entries, key=key.__getitem__):
        depth = len(key[path]) - 1
        comment = comments.get(path) or suggested_comment(path)
        lines.append(f"{'  ' * depth + key[path][-1][1]:<{COLUMN}} {comment}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the tree in README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    tree = draw(repository_files(), parse(FENCE.search(text).group(1)))
    readme.write_text(FENCE.sub(lambda _: f"```tree\n{tree}```", text, count=1), encoding="utf-8")
    print(f"README.md: {tree.count(chr(10))} entries, {tree.count(' ?' + chr(10))} without a comment")


if __name__ == "__main__":
    main()
