"""The front page and the pages behind it: their Python runs, their commands and links name what exists, and
README stays short.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jetrl_jax.__main__ import COMMANDS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import readme_picture

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
}
PACKAGES = ("jetrl_jax", "pallas_kernels", "bridge")
MAX_BYTES, MAX_LINES = 16 * 1024, 250


def code_blocks(text: str, language: str) -> list[str]:
    """Bodies of the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


BLOCKS = {
    f"{page}-{index}": code
    for page, text in sorted(PAGES.items())
    for index, code in enumerate(code_blocks(text, "python"))
}


def folders_of_the_code() -> set[str]:
    """Every folder of the three packages that holds Python, relative to the root, with a slash at its end."""
    return {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


def named_folders(listing: str) -> set[str]:
    """The folders that README's list of the code names; those on an indented line lie in the last folder that
    is not indented.
    """
    named, package = set(), ""
    for line in listing.splitlines():
        folders = re.findall(r"(?<!\S)(?:\w+/)+(?!\S)", line)
        if not line.startswith(" "):
            package = folders[0]
            named.add(package)
        else:
            named |= {package + folder for folder in folders}
    return named


def test_readme_is_short() -> None:
    assert len(README.encode()) < MAX_BYTES
    assert README.count("\n") < MAX_LINES


def test_readme_names_every_folder_of_the_code() -> None:
    named = named_folders(next(block for block in code_blocks(README, "text") if "pallas_kernels/" in block))
    assert not folders_of_the_code() - named, (
        f"folders that README leaves out: {sorted(folders_of_the_code() - named)}"
    )
    assert not {folder for folder in named if not (ROOT / folder).is_dir()}


def test_folders_are_read_from_the_list() -> None:
    assert named_folders("a/   b/c of no\n  b/  c/d/   both/neither, e/\ng/  last") == {
        "a/",
        "a/b/",
        "a/c/d/",
        "a/e/",
        "g/",
    }


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(name, marks=[pytest.mark.long] * ("policy" in text or "train()" in text))
        for name, text in BLOCKS.items()
    ],
)
def test_python_of_the_pages_runs(block: str, tmp_path: Path) -> None:
    """Each block runs by itself, in a directory that holds only the configs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    program = tmp_path / "block.py"
    program.write_text(BLOCKS[block], encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted(PAGES))
def test_commands_of_the_pages_exist(page: str) -> None:
    """`make` targets, commands and modules started with -m, and configs that a page names."""
    text = PAGES[page]
    shell = "\n".join(code_blocks(text, "bash")) + "\n".join(re.findall(r"`([^`\n]+)`", text))
    targets = set(
        re.findall(
            r"^([a-z0-9-]+)(?: [a-z0-9-]+)?:",
            (ROOT / "Makefile").read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
    )
    assert set(re.findall(r"\bmake ([a-z0-9-]+)", shell)) <= targets
    assert set(re.findall(r"-m jetrl_jax ([a-z][a-z_-]+)", shell)) <= set(COMMANDS)
    modules = set(re.findall(r"-m ((?:jetrl_jax|pallas_kernels|bridge)\.[\w.]+)", shell))
    assert {
        module for module in modules if not (ROOT / (module.replace(".", "/") + ".py")).is_file()
    } == set()
    assert {
        path for path in re.findall(r"\bconfigs/[\w.-]+\.yaml", shell) if not (ROOT / path).is_file()
    } == set()


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_of_the_pages_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]) + re.findall(
        r'(?:src|srcset)="([^"]+)"', PAGES[page]
    )
    local = [target for target in targets if "://" not in target]
    assert {target for target in local if not ((ROOT / page).parent / target).exists()} == set()


def test_every_page_of_the_documentation_is_in_the_index() -> None:
    assert {page for page in PAGES if page.startswith("docs/") and f"]({page})" not in README} == set()


@pytest.mark.parametrize("theme", readme_picture.THEMES)
def test_picture_has_a_point_for_every_row(theme: str) -> None:
    unified = [
        {"step": step, "reward/mean": step / 40, "mismatch/logprob_abs_mean": 0.0} for step in range(1, 41)
    ]
    mixed = [
        {"step": step, "reward/mean": 0.0, "mismatch/logprob_abs_mean": 1e-4 * step} for step in range(1, 41)
    ]
    lines = [
        node
        for node in ElementTree.fromstring(readme_picture.picture(unified, mixed, theme)).iter()
        if node.tag.endswith("polyline")
    ]
    reward, average, gap, zero = (
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()] for line in lines
    )
    assert [len(points) for points in (reward, average, gap, zero)] == [40] * 4
    # step 40 of 40, reward 1; step 1, 1/40
    assert reward[-1] == (400.0, 76.0) and reward[0] == pytest.approx((68.5, 245.65), abs=0.06)
    assert {y for _, y in zero} == {250.0}
    assert gap[-1] == pytest.approx((840.0, 250 - 174 * 4 / 5), abs=0.06)  # 4e-3 of an axis that ends at 5e-3


def test_picture_says_exact_only_where_it_is() -> None:
    rows = [{"step": 1, "reward/mean": 0.5, "mismatch/logprob_abs_mean": 1e-3}]
    assert "exactly 0" not in readme_picture.picture(rows, rows, "light")
    assert "exactly 0" in readme_picture.picture(
        [rows[0] | {"mismatch/logprob_abs_mean": 0.0}], rows, "light"
    )
