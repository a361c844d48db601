"""The presets: which format each product of a linear layer has, and the blocks of its operands."""

from __future__ import annotations

from collections.abc import Mapping

SITES = ("rollout", "fprop", "dgrad", "wgrad")
PRESETS: Mapping[str, tuple[str, str, str, str]] = {
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16", "bf16"),
    "fp16": ("fp16", "fp16", "fp16", "fp16"),
    "fp8_unified": ("fp8", "fp8", "fp8", "fp8"),
    "fp8_forward": ("fp8", "fp8", "bf16", "bf16"),
    "fp8_rollout_only": ("fp8", "bf16", "bf16", "bf16"),
}
COMPUTE_DTYPES = {"fp32": "float32", "fp16": "float16"}  # of the presets that are not BF16 between operations
FP8_LAYERS = ("*.self_attn.?_proj.weight", "*.mlp.*_proj.weight")
ACTIVATION_BLOCK, WEIGHT_BLOCK, TOKEN_BLOCK = (1, 128), (128, 128), (128, 1)
