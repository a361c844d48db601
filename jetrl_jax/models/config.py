"""The architecture of a policy as one frozen value, from and to a Hugging Face ``config.json``.

A dense decoder of the Qwen3, Qwen2 or Llama 3 kind is fixed by about twenty numbers. ``ModelConfig`` holds
them; ``ModelConfig.from_hf`` reads both spellings of the rotary embedding (``rope_theta`` + ``rope_scaling``, written by
transformers 4, and ``rope_parameters``, written by transformers 5) and ``to_hf`` writes both, so that either
version reads the result.

A value that ``config.json`` does not state is an error, never a default: transformers' own defaults differ
between classes and versions, and a silently wrong ``rope_theta`` or ``rms_norm_eps`` yields a model that only
looks healthy. Two things are fixed by the architecture and so are no values: Qwen2 always has biases on
q, k, v and never on o; a Qwen2 or Llama file without ``head_dim`` means ``hidden_size / num_attention_heads``.

Refused, by the name of the key: sliding-window attention, biases in the MLP, activations other than SiLU,
rotary types other than default, linear, llama3 and yarn, quantised checkpoints, custom code, attention dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
# What config.json must state of a rotary type, and what it may.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_ROPE_OPTIONS: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
# Keys that change the mathematics and are not implemented: each must be absent, null or one of the values given.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "auto_map": (),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the pre-training length.

    ``rope_type`` is one of

        linear   every frequency divided by ``factor``
        llama3   low frequencies divided by ``factor``, high ones kept, a linear blend between the two wavelengths
                 ``original_max_position_embeddings / low_freq_factor`` and ``... / high_freq_factor``
        yarn     the same by pairs of channels: a linear ramp between the two that turn ``beta_fast`` and ``beta_slow`` times
                 within the original length, moved outwards to whole pairs unless ``truncate`` is false; cos and sin are
                 multiplied by `attention_scaling`  (Peng et al. 2023)

    Fields of the other types are None, and so is what config.json leaves out: YaRN's ``beta_fast`` is then 32, ``beta_slow`` 1
    and ``truncate`` true, in the paper as in transformers and vLLM. Raises UserError on values outside these rules.
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
        kinds = [kind for kind in _ROPE_KEYS if kind != "default"]
        if self.rope_type not in kinds:
            _raise("RopeScaling", [f"got rope_type={self.rope_type!r}, expected one of {kinds}"])
        problems: list[str] = []
        required, optional = _ROPE_KEYS[self.rope_type], _ROPE_OPTIONS.get(self.rope_type, ())
        for name in (f.name for f in fields(self) if f.name != "rope_type"):
            value = getattr(self, name)
            holds, expected = _ROPE_RULES.get(name, (_is_positive_number, "a positive number"))
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
        """YaRN's (beta_fast, beta_slow): turns within the original length above which a frequency is kept, below which divided."""
        return self.beta_fast or 32.0, self.beta_slow or 1.0

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by; 1 but for YaRN.

        ``attention_factor`` where it is stated, else m(mscale) / m(mscale_all_dim) where both are, else m(1), with
        m(s) = 0.1 s ln(factor) + 1.
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

    def to_hf(self) -> dict[str, Any]:
        """The rope dictionary of ``config.json``, without ``rope_theta``."""
        optional = {key: getattr(self, key) for key in _ROPE_OPTIONS.get(self.rope_type, ()) if getattr(self, key) is not None}
        return {"rope_type": self.rope_type, **{key: getattr(self, key) for key in _ROPE_KEYS[self.rope_type]}, **optional}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a dense decoder's shapes and mathematics; hashable, so it may be a static argument.

    ``attention_bias`` puts a bias on q, k and v, and on o too where ``o_proj_bias`` says so (Llama and Qwen3;
    Qwen2's o has none). ``qk_norm`` is RMSNorm over ``head_dim`` of every query and key head (Qwen3 only).
    ``eos_token_ids`` may be empty. Raises UserError listing every field that breaks a rule.
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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a ``config.json`` (transformers 4 or 5 spelling).

        Raises UserError with one line for every missing key, every value of a wrong type and every key whose
        value asks for something this decoder does not have.
        """
        architecture = config.get("model_type")
        if architecture not in list(ARCHITECTURES):
            known = list(ARCHITECTURES)
            raise UserError(f"ModelConfig.from_hf: unsupported model: got model_type={architecture!r}, expected one of {known}")
        problems = _unsupported(config)
        fields: dict[str, Any] = {"architecture": architecture}
        for name, key in (
            ("vocab_size", "vocab_size"),
            ("hidden_size", "hidden_size"),
            ("intermediate_size", "intermediate_size"),
            ("num_layers", "num_hidden_layers"),
            ("num_heads", "num_attention_heads"),
            ("num_kv_heads", "num_key_value_heads"),
            ("max_position_embeddings", "max_position_embeddings"),
            ("rms_norm_eps", "rms_norm_eps"),
            ("tie_word_embeddings", "tie_word_embeddings"),
        ):
            fields[name] = _required(config, key, problems)
        fields["head_dim"] = _head_dim(config, problems)
        fields["attention_bias"] = _attention_bias(config, problems)
        fields["qk_norm"] = architecture == "qwen3"
        fields["rope_theta"], fields["rope_scaling"] = _rope(config, problems)
        fields["eos_token_ids"] = _eos(config, problems)
        fields["bos_token_id"], fields["pad_token_id"] = config.get("bos_token_id"), config.get("pad_token_id")
        _raise("ModelConfig.from_hf", problems)
        return cls(**fields)

    def to_hf(self, *, dtype: str | None = None) -> dict[str, Any]:
        """The dictionary of a ``config.json`` that transformers 4 and 5 (and vLLM) read as this model.

        ``dtype`` names the stored floating type ("bfloat16", "float32" …) under both of its keys, or leaves
        them out. ``ModelConfig.from_hf(c.to_hf()) == c`` for every valid ``c``.
        """
        rope = self.rope_scaling.to_hf() if self.rope_scaling is not None else None
        result: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **(rope or {"rope_type": "default"})},
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _scalar_or_list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
        }
        if self.architecture != "qwen2":
            result["attention_bias"] = self.attention_bias
        if self.architecture == "llama":
            result["mlp_bias"] = False
        else:
            result |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": self.num_layers}
        if dtype is not None:
            result |= {"dtype": dtype, "torch_dtype": dtype}
        return result


def _raise(function: str, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{function}: " + "; ".join(problems))


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


# Rules of the fields of `RopeScaling` that are no positive numbers.
_ROPE_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "original_max_position_embeddings": (_is_positive_int, "a positive integer"),
    "truncate": (lambda value: isinstance(value, bool), "true or false"),
}


def _float(value: Any) -> Any:
    """JSON writes 10000.0 as 10000 now and then; anything that is no good number is left for the rules to name."""
    return float(value) if _is_positive_number(value) else value


def _scalar_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def _field_problems(config: ModelConfig) -> list[str]:
    problems: list[str] = []

    def rule(holds: bool, name: str, expected: str) -> None:
        if not holds:
            problems.append(f"got {name}={getattr(config, name)!r}, expected {expected}")

    rule(config.architecture in list(ARCHITECTURES), "architecture", f"one of {list(ARCHITECTURES)}")
    for name in _SIZES:
        rule(_is_positive_int(getattr(config, name)), name, "a positive integer")
    for name in ("rope_theta", "rms_norm_eps"):
        rule(_is_positive_number(getattr(config, name)), name, "a positive number")
    for name in ("tie_word_embeddings", "attention_bias", "qk_norm"):
        rule(isinstance(getattr(config, name), bool), name, "true or false")
    rule(config.rope_scaling is None or isinstance(config.rope_scaling, RopeScaling), "rope_scaling", "RopeScaling or None")
    rule(isinstance(config.eos_token_ids, tuple), "eos_token_ids", "a tuple of token ids")
    if problems:
        return problems
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "yarn":
        longest = config.rope_scaling.factor * (config.rope_scaling.original_max_position_embeddings or 0)
        rule(config.rope_theta > 1, "rope_theta", "more than 1 for yarn scaling")
        stretched = f"at most factor * original_max_position_embeddings = {longest:g}, the length that YaRN stretches to"
        rule(config.max_position_embeddings <= longest, "max_position_embeddings", stretched)
    rule(config.num_heads % config.num_kv_heads == 0, "num_kv_heads", f"a divisor of num_heads={config.num_heads}")
    rule(config.head_dim % 2 == 0, "head_dim", "an even number, since RoPE turns pairs")
    rule(config.qk_norm == (config.architecture == "qwen3"), "qk_norm", f"{config.architecture == 'qwen3'} for {config.architecture}")
    if config.architecture == "qwen2":
        rule(config.attention_bias, "attention_bias", "True for qwen2, whose q, k and v always have biases")
    if config.architecture == "llama":
        rule(config.hidden_size % config.num_heads == 0, "hidden_size", f"a multiple of num_heads={config.num_heads} for llama")
    for name in ("eos_token_ids", "bos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if name == "eos_token_ids" else () if value is None else (value,)
        inside = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < config.vocab_size for i in ids)
        rule(inside, name, f"token ids from 0 to vocab_size-1={config.vocab_size - 1}")
    return problems


def _required(config: Mapping[str, Any], key: str, problems: list[str]) -> Any:
    if config.get(key) is None:
        problems.append(f"missing {key}: config.json must state it")
    return config.get(key)


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, allowed in _UNSUPPORTED.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            expected = " or ".join(["absent", *(repr(a) for a in allowed)])
            problems.append(f"unsupported {key}: got {value!r}, expected {expected}")
    if config.get("model_type") == "llama" and config.get("sliding_window") is not None:
        problems.append(f"unsupported sliding_window: got {config['sliding_window']!r}, expected null")
    other = sorted({str(t) for t in config.get("layer_types") or () if t != "full_attention"})
    if other:
        problems.append(f"unsupported layer_types: got {other}, expected only 'full_attention'")
    if _required(config, "hidden_act", problems) not in (None, "silu"):
        problems.append(f"unsupported hidden_act: got {config['hidden_act']!r}, expected 'silu'")
    expected_class, classes = ARCHITECTURES[config["model_type"]], config.get("architectures")
    if classes and expected_class not in classes:
        problems.append(f"unsupported architectures: got {classes!r}, expected [{expected_class!r}]")
    return problems


def _head_dim(config: Mapping[str, Any], problems: list[str]) -> Any:
    if config["model_type"] == "qwen3":
        return _required(config, "head_dim", problems)
    if config.get("head_dim") is not None:
        return config["head_dim"]
    hidden: Any = config.get("hidden_size")
    heads: Any = config.get("num_attention_heads")
    if not (_is_positive_int(hidden) and _is_positive_int(heads)):
        return None
    if hidden % heads:
        problems.append(f"missing head_dim: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    return hidden // heads


def _attention_bias(config: Mapping[str, Any], problems: list[str]) -> Any:
    if config["model_type"] != "qwen2":
        return _required(config, "attention_bias", problems)
    if config.get("attention_bias", True) is not True:
        problems.append(f"unsupported attention_bias: got {config['attention_bias']!r}, expected absent or true for qwen2")
    return True


def _rope(config: Mapping[str, Any], problems: list[str]) -> tuple[Any, RopeScaling | None]:
    """rope_theta and the scaling, from either spelling; two spellings that disagree are a problem."""
    thetas = [config["rope_theta"]] if config.get("rope_theta") is not None else []
    scalings: list[RopeScaling | None] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            problems.append(f"unsupported {key}: got {value!r}, expected a dictionary")
            continue
        if value.get("rope_theta") is not None:
            thetas.append(value["rope_theta"])
        scalings += _rope_dictionary(key, value, problems)
    if not thetas:
        problems.append("missing rope_theta: config.json must state it, alone or in rope_parameters")
    if any(theta != thetas[0] for theta in thetas):
        problems.append(f"ambiguous rope_theta: got {thetas}, expected one value")
    if len(set(scalings)) > 1:
        problems.append("ambiguous rope scaling: rope_parameters and rope_scaling disagree")
    return _float(thetas[0] if thetas else None), (scalings[0] if scalings else None)


def _rope_dictionary(key: str, value: Mapping[str, Any], problems: list[str]) -> list[RopeScaling | None]:
    """[RopeScaling], [None] for the plain embedding, or nothing where a problem was noted."""
    kinds = {value[name] for name in ("rope_type", "type") if value.get(name) is not None and isinstance(value[name], str)}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind not in _ROPE_KEYS:
        got = value.get("rope_type", value.get("type"))
        problems.append(f"unsupported {key}.rope_type: got {got!r}, expected one of {list(_ROPE_KEYS)}")
        return []
    wanted, optional = _ROPE_KEYS[kind], _ROPE_OPTIONS.get(kind, ())
    missing = [f"missing {key}.{name}: config.json must state it" for name in wanted if value.get(name) is None]
    known = {"rope_type", "type", "rope_theta", *wanted, *optional}
    harmless = (("partial_rotary_factor", 1.0),)
    extra = [(name, v) for name, v in value.items() if name not in known and v is not None and (name, v) not in harmless]
    problems += missing + [f"unsupported {key}.{name}: got {v!r} with rope_type {kind!r}, expected absent" for name, v in extra]
    if missing or extra:
        return []
    if kind == "default":
        return [None]
    stated = {name: value[name] for name in (*wanted, *optional) if value.get(name) is not None}
    try:
        return [RopeScaling(kind, **{name: v if name in _ROPE_RULES else _float(v) for name, v in stated.items()})]
    except UserError as error:
        problems.append(f"unsupported {key}: {error}")
        return []


def _eos(config: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    if "eos_token_id" not in config:
        problems.append("missing eos_token_id: config.json must state it (null for none)")
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
