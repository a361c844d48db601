"""Fuzzing of everything that reads a user's file: ``make fuzz``.

    python tests/benchmarks/fuzz.py [--seconds 600] [--targets config safetensors index jsonl]

Each target takes valid files and damages them (hypothesis draws the edits: bytes flipped, cut out, doubled,
replaced by fragments of the format).  What is read must come back, or end in a `UserError`; any other
exception, or a case that takes more than two seconds of CPU time, is a finding: hypothesis shrinks it and it
is printed.  Prints the number of cases of each target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bridge.hf.read import load_checkpoint
from bridge.hf.safetensors_file import read_header
from jetrl_jax.config.load import load_config
from jetrl_jax.config.task import FileSection
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.registry import build_task

ROOT = Path(__file__).resolve().parents[2]
SLOW_S = 2.0  # of CPU time
CASES_A_ROUND = 500

TINY_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 11, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
    "eos_token_id": 1, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SHAPES = {
    "embed_tokens.weight": (11, 8), "norm.weight": (8,), "layers.0.input_layernorm.weight": (8,),
    "layers.0.post_attention_layernorm.weight": (8,), "layers.0.self_attn.q_proj.weight": (8, 8),
    "layers.0.self_attn.k_proj.weight": (4, 8), "layers.0.self_attn.v_proj.weight": (4, 8), "layers.0.self_attn.o_proj.weight": (8, 8),
    "layers.0.self_attn.q_norm.weight": (4,), "layers.0.self_attn.k_norm.weight": (4,), "layers.0.mlp.gate_proj.weight": (12, 8),
    "layers.0.mlp.up_proj.weight": (12, 8), "layers.0.mlp.down_proj.weight": (8, 12),
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    """The weights of `TINY_CONFIG`, in two dtypes."""
    kinds = (ml_dtypes.bfloat16, np.float32)
    return {
        f"model.{name}": np.full(shape, 0.5, kinds[i % 2]) for i, (name, shape) in enumerate(SHAPES.items())
    }


FRAGMENTS: dict[str, list[bytes]] = {
    "config": [b"\n", b": ", b"- ", b"  ", b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"{", b"}", b"[", b"]", b"'", b'"', b"\t",
               b"1e-6", b"null", b"true", b".inf", b"model:\n", b"rewards:\n  - {name: task}\n", b"|", b"#", b"---\n", b"\xff", b"\x00"],
    "safetensors": [b"\x00" * 8, b"\xff" * 8, b'"', b"{", b"}", b"[0,0]", b"[-1,4]", b'"dtype":"F8_E4M3"', b"1e9", b"null", b"version ",
                    b'"__metadata__":{}', b"[18446744073709551616,0]"],
    "index": [b'"', b"{", b"}", b"..", b"/", b"model.safetensors", b"null", b"[]", b"\x00", b'"weight_map":{}', b"1e400", b"true"],
    "jsonl": [b"\n", b"{", b"}", b'"', b'{"prompt": "a", "answer": "b"}\n', b'"prompt":', b'"answer":', b"NaN", b"null", b"[" * 2000,
              b"\xff", b"\xef\xbb\xbf", b"1e999", b"\\ud800", b"\r\n", b"\x00"],
}  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, target: str, seeds: list[bytes]) -> bytes:
    """A seed file with up to six edits."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "fragment", "double", "end"]))
        length = draw(st.integers(0, 40))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + length]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=12))
        elif kind == "fragment":
            data[place : place + draw(st.integers(0, 4))] = draw(st.sampled_from(FRAGMENTS[target]))
        elif kind == "double":
            data[place:place] = data[place : place + length]
        elif kind == "end":
            del data[place:]
    return bytes(data)


def read_config(file: Path) -> None:
    """The config loader."""
    load_config(file, [])


def read_safetensors(file: Path) -> None:
    """The header parser and every tensor it finds."""
    for stored in read_header(file).values():
        stored.read()


def read_index(file: Path) -> None:
    """A checkpoint whose index is the file."""
    root = file.parent / "checkpoint"
    if not root.exists():
        root.mkdir()
        (root / "config.json").write_text(json.dumps(TINY_CONFIG))
        names = list(tensors())
        for number, part in ((1, names[:6]), (2, names[6:])):
            (root / f"model-{number:05d}-of-00002.safetensors").write_bytes(
                save({name: tensors()[name] for name in part})
            )
    (root / "model.safetensors.index.json").write_bytes(file.read_bytes())
    load_checkpoint(root)


def read_jsonl(file: Path) -> None:
    """A task of the file's records."""
    build_task(FileSection(path=str(file)), 0)


def seeds(target: str) -> list[bytes]:
    """Valid files to begin with."""
    if target == "config":
        return [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    if target == "safetensors":
        return [
            save(tensors()),
            save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(0, np.uint8)}, metadata={"format": "pt"}),
        ]
    if target == "index":
        names = list(tensors())
        files = {name: f"model-{1 + (i >= 6):05d}-of-00002.safetensors" for i, name in enumerate(names)}
        return [json.dumps({"metadata": {"total_size": 1}, "weight_map": files}).encode()]
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": f"{a}+{b}={a + b}"}
        for a in range(3)
        for b in range(3)
    ]
    return ["\n".join(json.dumps(row) for row in rows).encode() + b"\n"]


TARGETS: dict[str, Callable[[Path], None]] = {
    "config": read_config,
    "safetensors": read_safetensors,
    "index": read_index,
    "jsonl": read_jsonl,
}


def fuzz(target: str, seconds: float, *, derandomize: bool = False) -> Counter[str]:
    """Runs a target for some seconds, in rounds; returns how many cases were read and refused, raises at a
    finding.
    """
    counts: Counter[str] = Counter()
    for valid in seeds(target):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "file").write_bytes(valid)
            TARGETS[target](Path(directory) / "file")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "file"

        @settings(
            max_examples=CASES_A_ROUND,
            deadline=None,
            database=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        )
        @given(data=damaged(target, seeds(target)))
        def case(data: bytes) -> None:
            file.write_bytes(data)
            start = time.process_time()
            try:
                TARGETS[target](file)
                counts["read"] += 1
            except UserError:
                counts["refused"] += 1
            if time.process_time() - start > SLOW_S:
                raise AssertionError(f"{target}: a case took {time.process_time() - start:.1f} s")

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            case()
    return counts


def main() -> int:
    """Fuzzes the targets one after the other; status 1 at a finding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    options = parser.parse_args()
    found = 0
    for target in options.targets:
        try:
            counts = fuzz(target, options.seconds)
            print(
                f"{target}: {counts.total():,} cases in {options.seconds:.0f} s: {counts['read']:,} "
                f"read, {counts['refused']:,} refused",
                flush=True,
            )
        except Exception as error:
            found += 1
            print(f"{target}: FINDING: {type(error).__name__}: {error}", flush=True)
            for note in getattr(error, "__notes__", ()):
                print(f"  {note}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
