"""vLLM's CUDA build, small enough to be copied to a GPU machine without network: a part of ``make gpu-call``.

For Python 3.12, torch 2.11+cu130, triton 3.6, transformers 5 and a Hopper GPU (sm_90).  Pinned wheels are
installed without their dependencies; files that a dense decoder in block FP8 or BF16 does not load are left
out; in the CUDA libraries every image that is not for sm_90 is overwritten with zeros, which compress away
(the driver reads only the images that fit).  FlashAttention 3 keeps its BF16 kernels.  Not in it: mixtures of
experts, FP16 attention, an FP8 cache, FlashInfer; xgrammar is a stub.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PINS = """annotated-types==0.8.0 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0 compressed-tensors==0.17.0
depyf==0.20.0 dill==0.4.1 diskcache==5.6.3 fastapi==0.136.3 httpcore2==2.16.2 httpx2==2.16.2 ijson==3.6.0 jiter==0.19.0
llguidance==1.9.1 loguru==0.7.3 msgspec==0.22.0 openai==3.57.0 openai-harmony==0.0.8 partial-json-parser==0.2.1.1.post7
pybase64==1.5.1 pydantic==2.14.4 pydantic_core==2.50.5 python-json-logger==4.2.0 pyzmq==27.3.0 setproctitle==1.3.8
sniffio==1.3.1 starlette==1.10.0 truststore==0.10.5 typing-inspection==0.4.5 vllm==0.24.0 watchfiles==1.3.0""".split()
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100",
    "vllm/_flashmla",
    "vllm/_qutlass",
    "vllm/_rust_tool",
)
LEFT_OUT += ("vllm/vllm_flash_attn/_vllm_fa2", "vllm/model_executor/layers/fused_moe/configs")
LEFT_OUT += ("vllm/entrypoints/serve/instrumentator/static", "bin/")
XGRAMMAR = '''"""A stub: vLLM touches xgrammar when it is imported; structured output is not in this bundle."""


class _Absent:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("xgrammar is a stub here")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Absent,), {})
'''
FATBIN_MAGIC = b"\x50\xed\x55\xba"
Keep = Callable[[int, bytes], bool]
"""Whether the image of an architecture (90 for sm_90) with these bytes stays."""


def keep_sm90(architecture: int, image: bytes) -> bool:
    """Images for Hopper."""
    return architecture == 90


def keep_bf16_attention(architecture: int, image: bytes) -> bool:
    """FlashAttention 3: its BF16 kernels, and those that prepare and combine."""
    if b"FlashAttnFwdCombine" in image or (b"prepare_varlen" in image and b"FlashAttnFwdSm90" not in image):
        return True
    return b"bfloat16_t" in image and b"float_e4m3" not in image and b"half_t" not in image


def fatbin_section(path: Path) -> tuple[int, int] | None:
    """(offset, bytes) of .nv_fatbin in an ELF file, None where there is no such section."""
    text = subprocess.run(["readelf", "-SW", str(path)], capture_output=True, text=True, check=True).stdout
    for name, offset, size in re.findall(r"\]\s+(\S+)\s+PROGBITS\s+\S+\s+(\S+)\s+(\S+)", text):
        if name == ".nv_fatbin":
            return int(offset, 16), int(size, 16)
    return None


def zeroed_images(data: bytes, section: tuple[int, int], keep: Keep) -> tuple[bytes, int]:
    """`data` with every GPU image of its section that is not kept overwritten with zeros, and how many bytes
    that were.

    Headers and offsets stay.  A fat binary is a header (magic, version, its own size, bytes that follow) and
    images, each a header (kind, version, its own size, bytes that follow, ..., architecture) and a payload.
    """
    out, zeroed = bytearray(data), 0
    position, end = section[0], sum(section)
    while position < end:
        if out[position : position + 4] != FATBIN_MAGIC:
            position += 8 if position % 8 == 0 else 1
            continue
        _, _, header, size = struct.unpack_from("<IHHQ", out, position)
        image, position = position + header, position + header + size
        while image < position:
            _, _, own, payload, *_, architecture = struct.unpack_from("<HHIQIIHHI", out, image)
            start, stop = image + own, image + own + payload
            if not keep(architecture, bytes(out[start:stop])):
                out[start:stop] = bytes(payload)
                zeroed += payload
            image = stop
    return bytes(out), zeroed


def write_bundle(site: Path) -> None:
    """Fills the empty directory `site`, from which Python 3.12 can then import vLLM."""
    words = ["-qq", "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words, *PINS], check=True)
    for path in sorted(site.rglob("*"), reverse=True):
        name = path.relative_to(site).as_posix()
        other_python = "deep_gemm/_C" in name and "312" not in name
        if name.startswith(LEFT_OUT) or other_python or "__pycache__" in name:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for library in sorted((site / "vllm").rglob("*.so")):
        section = fatbin_section(library)
        if section is not None:
            keep = keep_bf16_attention if "_vllm_fa3_C" in library.name else keep_sm90
            data, zeroed = zeroed_images(library.read_bytes(), section, keep)
            library.write_bytes(data)
            print(f"{library.name}: {zeroed / 1e6:.0f} MB of images for other GPUs zeroed", flush=True)
    (site / "xgrammar").mkdir()
    (site / "xgrammar" / "__init__.py").write_text(XGRAMMAR, encoding="utf-8")
