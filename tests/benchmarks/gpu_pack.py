"""Packs what a GPU machine without network lacks of this project, and prints the commands for it: ``make
gpu-call``.

    python tests/benchmarks/gpu_pack.py [--no-vllm] [--limit-mib 64]

Into .gpu/, which git ignores; only .gpu/packed has to travel, with the checkout:

    site.txz      packages that the machine lacks, unpacked for Python 3.12, and the project's own entry
                  point, by which vLLM finds the plugin
    triton.txz    jax_triton, for the tests of the Triton kernel
    vllm.txz      vLLM's CUDA build cut down to some 40 MB (gpu_vllm.py; three minutes), made once
    COMMIT        what `git rev-parse HEAD` said, for a copy without git

The machine it is made for, the commands and what they run: docs/gpu_machine.md.  Needs the network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the project is not installed

from tests.benchmarks import gpu_vllm
from tests.benchmarks.gpu_stages import CALLS

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / ".ci" / "constraints-py312.txt"
LACKING = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "tensorboardx")
LACKING += ("jaxtyping", "wadler-lindig", "beartype")
"""What the machine lacks of the project's dependencies and its tests', those of dependencies too.
plotly and jinja2, for reports only, stay away.
"""
JAX_TRITON = "jax-triton==0.3.1"  # the last that triton 3.6 takes
PLATFORMS = (
    "any",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34)),
)
MIB = 1 << 20


def pins(names: Iterable[str], constraints: str) -> list[str]:
    """`name==version` of each, from the text of a file of constraints. Raises ValueError for those without a
    pin.
    """
    found = dict(re.findall(r"^(\S+?)==(\S+)$", constraints, flags=re.MULTILINE))
    if missing := sorted(set(names) - set(found)):
        raise ValueError(
            f"pins: no version: got none for {', '.join(missing)}, expected a pin of each in "
            f"{CONSTRAINTS.name}."
        )
    return [f"{name}=={found[name]}" for name in names]


def download(requirement: str, folder: Path) -> Path:
    """The wheel of `name==version` for Python 3.12 on Linux; from `folder` where it was put there before."""
    start = requirement.replace("-", "_").replace("==", "-") + "-"

    def there() -> list[Path]:  # the index, not the requirement, decides on capital letters
        return [path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(start)]

    if not there():
        words = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        words += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", *words, "-d", str(folder), requirement],
            check=True,
        )
    if not there():
        raise RuntimeError(
            f"download: no wheel: got nothing like {start}*.whl in {folder} after pip download {requirement}."
        )
    return there()[0]


def write_metadata(folder: Path, pyproject: str) -> None:
    """Name, version and entry points of the project, as an installation would leave them in `folder`."""
    project = tomllib.loads(pyproject)["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")


def write_archive(folder: Path, path: Path) -> None:
    """All of `folder` as a tar archive compressed by xz; the same files give the same bytes."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    part = path.with_name(f"{path.name}.part")
    with tarfile.open(part, "w:xz", preset=6) as archive:
        for child in sorted(folder.iterdir()):
            # `add` goes through directories in order of their names
            archive.add(child, child.name, filter=bare)
    part.replace(path)


def pack(wheels: Iterable[Path], path: Path, pyproject: str | None = None) -> None:
    """An archive from which Python can import these wheels and, with `pyproject`, find the project's entry
    points.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
        if pyproject is not None:
            write_metadata(folder, pyproject)
        write_archive(folder, path)


def checkout_bytes(root: Path) -> int:
    """Bytes of the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((root / name).stat().st_size for name in set(listed) if name and (root / name).is_file())


def check_size(checkout: int, packed: dict[str, int], limit_mib: float) -> str:
    """A line with all sizes. Raises ValueError where they are more than can be copied."""
    total = checkout + sum(packed.values())
    parts = [f"checkout {checkout / MIB:.1f}", *(f"{name} {size / MIB:.1f}" for name, size in packed.items())]
    line = f"{' + '.join(parts)} = {total / MIB:.1f} MiB"
    if total > limit_mib * MIB:
        raise ValueError(
            f"gpu_pack: too much to copy: got {line}, expected at most {limit_mib:g} MiB (--limit-mib)."
        )
    return line


def commands() -> str:
    """The two commands, with the seconds that each takes at most."""
    lines = ["Copy the checkout and .gpu/packed to the machine; run these in the root of the checkout:", ""]
    lines += [
        f"    python3 tests/benchmarks/gpu.py --call {call}    # at most {CALLS[call].seconds + 20:.0f} s"
        for call in CALLS
    ]
    return "\n".join([*lines, "", "Without a GPU, to see that every job starts:  make gpu-call-dry"])


def main(argv: Sequence[str]) -> int:
    """Packs, checks the size, prints the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--no-vllm",
        action="store_true",
        help="without vLLM's CUDA build: no contract, no gap to vLLM, no DeepGEMM",
    )
    parser.add_argument(
        "--limit-mib",
        type=float,
        default=64.0,
        help="what may be copied to the machine in all, default %(default)s",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".gpu", help="directory of wheels and archives, default .gpu"
    )
    options = parser.parse_args(argv)
    cut = hashlib.sha256(Path(gpu_vllm.__file__).read_bytes()).hexdigest()[:8]  # another cut is another file
    wheels, kept, packed = (options.out / name for name in ("wheels", f"vllm-{cut}.txz", "packed"))
    for folder in (wheels, packed):
        folder.mkdir(parents=True, exist_ok=True)
    constraints, pyproject = (
        CONSTRAINTS.read_text(encoding="utf-8"),
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
    )
    pack([download(name, wheels) for name in pins(LACKING, constraints)], packed / "site.txz", pyproject)
    pack([download(JAX_TRITON, wheels)], packed / "triton.txz")
    if not options.no_vllm and not kept.exists():
        print("packing vLLM (some minutes) ...", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            gpu_vllm.write_bundle(Path(directory))
            write_archive(Path(directory), kept)
    (packed / "vllm.txz").unlink(missing_ok=True)
    if not options.no_vllm:
        os.link(kept, packed / "vllm.txz")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (packed / "COMMIT").write_text(head, encoding="utf-8")
    print(
        check_size(
            checkout_bytes(ROOT),
            {path.name: path.stat().st_size for path in sorted(packed.glob("*.txz"))},
            options.limit_mib,
        )
    )
    print(f"\n{commands()}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
