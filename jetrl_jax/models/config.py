"""The architecture of a policy as one frozen value.

About twenty numbers define a dense decoder of the Qwen3, Qwen2 or Llama 3 kind.  `ModelConfig` holds them;
`bridge.hf.config` reads and writes them as Hugging Face's ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from jetrl_jax.errors import UserError

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
# The keys that config.json must have for a rotary type, and those that it may have.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of the rotary frequencies beyond the pre-training length.

    ``rope_type`` is one of

        linear   every frequency divided by ``factor``
        llama3   low frequencies divided by ``factor``, high ones kept, a linear blend between the two
                 wavelengths ``original_max_position_embeddings / low_freq_factor`` and ``... /
                 high_freq_factor``
        yarn     the same by pairs of channels: a linear ramp between the two that turn ``beta_fast`` and
                 ``beta_slow`` times within the original length, moved outwards to whole pairs unless
                 ``truncate`` is false; cos and sin are multiplied by `attention_scaling` (Peng et al. 2023)

    Fields of other types are None, and so are fields that config.json leaves out.  For YaRN, ``beta_fast`` is
    then 32, ``beta_slow`` 1 and ``truncate`` true, as in the paper, transformers and vLLM.  Raises UserError
    for values outside these rules.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        kinds = [kind for kind in ROPE_KEYS if kind != "default"]
        if self.rope_type not in kinds:
            _raise("RopeScaling", [f"got rope_type={self.rope_type!r}, expected one of {kinds}"])
        problems: list[str] = []
        required, optional = ROPE_KEYS[self.rope_type], ROPE_OPTIONS.get(self.rope_type, ())
        for name in (f.name for f in fields(self) if f.name != "rope_type"):
            value = getattr(self, name)
            holds, expected = ROPE_RULES.get(name, (is_positive_number, "a positive number"))
            if name not in (*required, *optional):
                holds, expected = (lambda v: v is None), f"None for {self.rope_type} scaling"
            if not (holds(value) or (value is None and name in optional)):
                problems.append(f"got {name}={value!r}, expected {expected}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not problems and low is not None and high is not None and high <= low:
            problems.append(f"got high_freq_factor={high!r}, expected more than low_freq_factor={low!r}")
        if not problems and self.rope_type == "yarn" and self.factor < 1:
            problems.append(f"got factor={self.factor!r}, expected at least 1 for yarn scaling")
        if not problems and self.rope_type == "yarn" and self.betas[0] < self.betas[1]:
            problems.append(f"got beta_fast={self.betas[0]!r}, expected at least beta_slow={self.betas[1]!r}")
        _raise("RopeScaling", problems)

    @property
    def betas(self) -> tuple[float, float]:
        """YaRN's (beta_fast, beta_slow), in turns within the original length.

        Frequencies with more turns than beta_fast are kept; those with fewer than beta_slow are divided.
        """
        return self.beta_fast or 32.0, self.beta_slow or 1.0

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin, which is 1 except for YaRN.

        It is ``attention_factor`` if given, else m(mscale) / m(mscale_all_dim) if both are given, else m(1),
        with m(s) = 0.1 s ln(factor) + 1.
        """
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class ModelConfig:
    """The shapes and mathematics of a dense decoder; hashable, so that it may be a static argument.

    ``attention_bias`` puts a bias on q, k and v, and on o too if ``o_proj_bias`` is true (in Llama and Qwen3;
    Qwen2's o has none).  ``qk_norm`` is RMSNorm over ``head_dim`` of every query and key head (only Qwen3).
    ``eos_token_ids`` may be empty.  Raises UserError listing every field that breaks a rule.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _raise("ModelConfig", _field_problems(self))

    @property
    def o_proj_bias(self) -> bool:
        """Whether the attention output projection has a bias: as ``attention_bias``, but never in Qwen2."""
        return self.attention_bias and self.architecture != "qwen2"


def _raise(function: str, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{function}: " + "; ".join(problems))


def is_positive_int(value: Any) -> bool:
    """Whether a value, of any type, is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_positive_number(value: Any) -> bool:
    """Whether a value, of any type, is a positive finite number."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )


# Rules of the fields of `RopeScaling` that are not positive numbers.
ROPE_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "original_max_position_embeddings": (is_positive_int, "a positive integer"),
    "truncate": (lambda value: isinstance(value, bool), "true or false"),
}


def _field_problems(config: ModelConfig) -> list[str]:
    problems: list[str] = []

    def rule(holds: bool, name: str, expected: str) -> None:
        if not holds:
            problems.append(f"got {name}={getattr(config, name)!r}, expected {expected}")

    rule(config.architecture in list(ARCHITECTURES), "architecture", f"one of {list(ARCHITECTURES)}")
    for name in _SIZES:
        rule(is_positive_int(getattr(config, name)), name, "a positive integer")
    for name in ("rope_theta", "rms_norm_eps"):
        rule(is_positive_number(getattr(config, name)), name, "a positive number")
    for name in ("tie_word_embeddings", "attention_bias", "qk_norm"):
        rule(isinstance(getattr(config, name), bool), name, "true or false")
    rule(
        config.rope_scaling is None or isinstance(config.rope_scaling, RopeScaling),
        "rope_scaling",
        "RopeScaling or None",
    )
    rule(isinstance(config.eos_token_ids, tuple), "eos_token_ids", "a tuple of token ids")
    if problems:
        return problems
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "yarn":
        longest = config.rope_scaling.factor * (config.rope_scaling.original_max_position_embeddings or 0)
        rule(config.rope_theta > 1, "rope_theta", "more than 1 for yarn scaling")
        stretched = (
            f"at most factor * original_max_position_embeddings = {longest:g}, the length that "
            "YaRN stretches to"
        )
        rule(config.max_position_embeddings <= longest, "max_position_embeddings", stretched)
    rule(
        config.num_heads % config.num_kv_heads == 0,
        "num_kv_heads",
        f"a divisor of num_heads={config.num_heads}",
    )
    rule(config.head_dim % 2 == 0, "head_dim", "an even number, since RoPE turns pairs")
    rule(
        config.qk_norm == (config.architecture == "qwen3"),
        "qk_norm",
        f"{config.architecture == 'qwen3'} for {config.architecture}",
    )
    if config.architecture == "qwen2":
        rule(config.attention_bias, "attention_bias", "True for qwen2, whose q, k and v always have biases")
    if config.architecture == "llama":
        rule(
            config.hidden_size % config.num_heads == 0,
            "hidden_size",
            f"a multiple of num_heads={config.num_heads} for llama",
        )
    for name in ("eos_token_ids", "bos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if name == "eos_token_ids" else () if value is None else (value,)
        inside = all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < config.vocab_size for i in ids
        )
        rule(inside, name, f"token ids from 0 to vocab_size-1={config.vocab_size - 1}")
    return problems
