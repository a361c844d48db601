"""What a run meets: a disk that fills up, a directory that cannot be written, and the page that lists every
fault.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from tiny import ROOT, command_environment, rows, run_module, tiny_config, train_command, write_config

# A file system of its own, small at first; then the disk grows and the run goes on.
FILLS_UP = """
mkdir -p "$DISK" && mount -t tmpfs -o size=700k tmpfs "$DISK" || exit 77
"$@" >"$OUT/first.out" 2>"$OUT/first.err"; echo $? >"$OUT/first.status"
mount -o remount,size=50m "$DISK" || exit 77
"$@" --resume >"$OUT/second.out" 2>"$OUT/second.err"; echo $? >"$OUT/second.status"
cp "$DISK/run/metrics.jsonl" "$OUT/" && cp -r "$DISK/run/export" "$OUT/"
"""


@pytest.mark.long
def test_full_disk_stops_the_run_and_loses_nothing(tmp_path, compilation_cache):
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode != 0:
        pytest.skip(
            "a disk of the test's own needs `unshare -Urm` (user namespaces), which this machine refuses"
        )
    whole = write_config(tiny_config(tmp_path / "whole"), tmp_path / "whole.yaml")
    assert run_module("jetrl_jax.train", "--config", str(whole), cache=compilation_cache).returncode == 0
    disk = tmp_path / "disk"
    config = write_config(tiny_config(disk / "run"), tmp_path / "config.yaml")
    environment = command_environment(compilation_cache) | {"DISK": str(disk), "OUT": str(tmp_path)}
    shell = ["unshare", "-Urm", "bash", "-c", FILLS_UP, "bash", *train_command(config)]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    assert (tmp_path / "first.status").read_text().strip() == "3", (tmp_path / "first.err").read_text()
    errors = (tmp_path / "first.err").read_text()
    message = errors.splitlines()[-1]
    assert message.startswith("stopped: ") and "No space left on device" in message and "--resume" in message
    assert "Traceback" not in errors and "never awaited" not in errors, errors
    assert (tmp_path / "second.status").read_text().strip() == "0", (tmp_path / "second.err").read_text()
    assert rows(tmp_path) == rows(tmp_path / "whole")
    for file in (tmp_path / "whole" / "export").glob("*.safetensors"):
        assert (tmp_path / "export" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("directory", ["/proc/run", "FILE/run"])
def test_directory_that_cannot_be_made_ends_with_status_2(directory, tmp_path, compilation_cache):
    (tmp_path / "file").write_text("not a directory")
    place = directory.replace("FILE", str(tmp_path / "file"))
    config = write_config(tiny_config(place), tmp_path / "config.yaml")
    done = run_module("jetrl_jax.train", "--config", str(config), cache=compilation_cache)
    assert done.returncode == 2 and "Traceback" not in done.stderr and place in done.stderr, done.stderr


def test_every_fault_of_the_page_names_tests_that_exist():
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert len(table) >= 25
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4 and all(cells), line
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cells[3])
        assert named, f"no test: {line}"
        for file, function in named:
            (path,) = (ROOT / "tests").rglob(file)
            assert re.search(rf"^def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE), (
                f"{file} has no {function}"
            )


def test_nothing_unpickles_what_a_checkpoint_or_a_data_file_holds():
    """Files from disk are never unpickled or evaluated.

    Three files may: rewards are pickled by the trainer for its own workers, a kernel is taken from the
    installed vLLM's code, and the Python tool runs the policy's code in a child.
    """
    pattern = re.compile(
        r"pickle\.loads?\(|allow_pickle=True|torch\.load\(|yaml\.(?:unsafe_|full_)?load\(|(?<!def "
        r")\beval\(|\bexec\("
    )
    found = set()
    for package in ("jetrl_jax", "bridge", "pallas_kernels"):
        for path in (ROOT / package).rglob("*.py"):
            if pattern.search(path.read_text(encoding="utf-8")):
                found.add(os.path.relpath(path, ROOT))
    tool = "jetrl_jax/tasks/environments/python.py"
    assert found <= {"jetrl_jax/workers/worker.py", "pallas_kernels/gemm/vllm_triton.py", tool}, found
