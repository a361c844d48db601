"""Programs are kept in the user's cache folder, found again by the next process, and never grow without end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_jax.devices import compilation_cache
from jetrl_jax.devices.compilation_cache import _drop_oldest, _key, keep_programs

SCRIPT = """
import jax, jax.numpy as jnp
from jetrl_jax.devices.compilation_cache import keep_programs
jax.jit(lambda x: x + 1)(jnp.ones(3))  # JAX has looked for a folder
print(keep_programs())
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
print(float(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((64, 64)))[0, 0]))
print(sum(event.endswith("compilation_cache/cache_hits") for event in hits))
"""


def _run(home: Path, **more: str) -> list[str]:
    mine = {"JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    environment |= {"XDG_CACHE_HOME": str(home), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | more
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.long
def test_second_process_compiles_nothing_again(tmp_path: Path) -> None:
    folder, value, hits = _run(tmp_path)
    assert Path(folder).parent == tmp_path / "jetrl-jax" / "programs"
    assert int(hits) == 0 and list(Path(folder).glob("*-cache"))
    again = _run(tmp_path)
    assert again[:2] == [folder, value] and int(again[2]) > 0


def test_a_folder_that_is_set_is_kept() -> None:
    assert keep_programs() is None  # the tests have one of their own


@pytest.mark.long
def test_cache_that_is_turned_off_stays_off(tmp_path: Path) -> None:
    assert _run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[0] == "None"
    assert not list(tmp_path.iterdir())


def test_key_names_versions_instructions_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert _key() != before
    monkeypatch.setattr(compilation_cache, "_instructions", lambda: "flags : sse2")
    assert "flags : sse2" in _key()


def test_oldest_programs_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 25)
    for age, name in enumerate(("new", "middle", "old")):
        file = tmp_path / f"key{age}" / f"{name}-cache"
        file.parent.mkdir()
        file.write_bytes(b"x" * 10)
        os.utime(file, (1000 - age, 1000 - age))
    _drop_oldest(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*/*-cache")) == ["middle-cache", "new-cache"]
