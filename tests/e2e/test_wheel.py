"""The package as a wheel: every file of the three packages is in it, with the configs, and it trains outside
the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jetrl_jax", "pallas_kernels", "bridge")
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "configs", *PACKAGES)
# One step of the tiny config, with as little of everything as it allows.
SMALL = (
    "run.steps=1", "warm_start.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2",
    "batch.microbatch_tokens=76", "eval.prompts=2", "eval.samples=1", "run.directory=run",
)  # fmt: skip


def files_of_the_checkout(*under: str) -> list[str]:
    """Paths of the files under these names that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *under]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted({path for path in listed if path and (ROOT / path).is_file()})


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed; no path of the checkout reaches it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the setuptools that is installed and without a network."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77, which builds the wheel, is not installed")
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for path in files_of_the_checkout(*BUILT_FROM):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-index",
        ),
        *("--no-build-isolation", "--wheel-dir", out, copy),
        cwd=out,
    )
    return next(out.glob("jetrl_jax-*.whl"))


def test_wheel_holds_every_file_of_the_packages_and_the_configs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(
            archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")
        )
    configs = {
        f"jetrl_jax/configs/{Path(path).name}"
        for path in files_of_the_checkout("configs")
        if path.endswith(".yaml")
    }
    assert packed == {*files_of_the_checkout(*PACKAGES), *configs}
    assert "jetrl_jax/configs/tiny_cpu.yaml" in packed
    assert "[vllm.general_plugins]\njetrl = bridge.vllm.worker.plugin:register" in entry_points


@pytest.mark.long
def test_wheel_trains_the_tiny_config_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, that takes all other packages from this one."""
    environment, work = tmp_path / "environment", tmp_path / "work"
    venv.create(environment, symlinks=True, with_pip=False)
    work.mkdir()
    python = environment / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip()
    )
    # Paths in a .pth file are searched; the .pth files there, such as that of an editable installation, are
    # not read.
    (packages / "others.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) + "\n"
    )
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        wheel,
        cwd=work,
    )
    where = run(
        python, "-c", "import jetrl_jax, pallas_kernels, bridge; print(jetrl_jax.__file__)", cwd=work
    ).strip()
    assert Path(where).is_relative_to(packages)
    plugin = (
        "from importlib.metadata import entry_points as e; print(e(group='vllm.general_plugins', "
        "name='jetrl')['jetrl'].load())"
    )
    assert "register" in run(python, "-c", plugin, cwd=work)

    (work / "tiny.yaml").write_text(run(python, "-m", "jetrl_jax", "config", "tiny_cpu", cwd=work))
    changes = [word for change in SMALL for word in ("--set", change)]
    assert f"finished 1 steps in {work / 'run'}" in run(
        python, "-m", "jetrl_jax.train", "--config", "tiny.yaml", *changes, cwd=work
    )
    assert f"wrote {work / 'run' / 'report.html'}" in run(
        python, "-m", "jetrl_jax", "report", "run", cwd=work
    )
    said = run(python, "-m", "jetrl_jax", "generate", "--checkpoint", "run", "--prompt", "jetrl=", cwd=work)
    assert said.count("\n") == 1
