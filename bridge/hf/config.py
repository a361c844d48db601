"""Converts a model's architecture from and to Hugging Face's ``config.json``, without transformers.

`from_hf` reads both spellings of the rotary embedding: ``rope_theta`` + ``rope_scaling``, written by
transformers 4, and ``rope_parameters``, written by transformers 5.  `to_hf` writes both, so that either
version can read the result.

A value missing from ``config.json`` is an error and never gets a default.  transformers' own defaults differ
between classes and versions, and a silently wrong ``rope_theta`` or ``rms_norm_eps`` gives a model that only
looks right.  Two values follow from the architecture instead: Qwen2 always has biases on q, k, v and never on
o, and in a Qwen2 or Llama file a missing ``head_dim`` means ``hidden_size / num_attention_heads``.

Refused, with the name of the key: sliding-window attention, biases in the MLP, activations other than SiLU,
rotary types other than default, linear, llama3 and yarn, quantised checkpoints, custom code, attention
dropout, heads that predict several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.models.config import (
    ARCHITECTURES,
    ROPE_KEYS,
    ROPE_OPTIONS,
    ROPE_RULES,
    ModelConfig,
    RopeScaling,
    is_positive_int,
    is_positive_number,
)

# Keys that change the mathematics and are not implemented; each must be absent, null or one of these values.
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
    "num_nextn_predict_layers": (0,),  # heads for several tokens (MTP), whose weights would be dropped
    "mtp_num_hidden_layers": (0,),
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The architecture in the dictionary of a ``config.json`` (transformers 4 or 5 spelling).

    Raises UserError with one line for every missing key, every value of a wrong type, and every value that
    needs a feature which this decoder lacks.
    """
    architecture = config.get("model_type")
    if architecture not in list(ARCHITECTURES):
        known = list(ARCHITECTURES)
        raise UserError(
            f"from_hf: unsupported model: got model_type={architecture!r}, expected one of {known}"
        )
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
    fields["bos_token_id"] = config.get("bos_token_id")
    fields["pad_token_id"] = config.get("pad_token_id")
    if problems:
        raise UserError("from_hf: " + "; ".join(problems))
    return ModelConfig(**fields)


def to_hf(model: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The dictionary of a ``config.json`` that transformers 4 and 5 (and vLLM) read as this model.

    ``dtype`` is the stored floating type ("bfloat16", "float32" …), written under both of its keys; None
    leaves them out.  ``from_hf(to_hf(c)) == c`` for every valid ``c``.
    """
    rope = rope_to_hf(model.rope_scaling) if model.rope_scaling is not None else None
    result: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": rope,
        "rope_parameters": {"rope_theta": model.rope_theta, **(rope or {"rope_type": "default"})},
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": _scalar_or_list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
    }
    if model.architecture != "qwen2":
        result["attention_bias"] = model.attention_bias
    if model.architecture == "llama":
        result["mlp_bias"] = False
    else:
        result |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.num_layers}
    if dtype is not None:
        result |= {"dtype": dtype, "torch_dtype": dtype}
    return result


def rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """The rope dictionary of ``config.json``, without ``rope_theta``."""
    optional = {
        key: getattr(scaling, key)
        for key in ROPE_OPTIONS.get(scaling.rope_type, ())
        if getattr(scaling, key) is not None
    }
    return {
        "rope_type": scaling.rope_type,
        **{key: getattr(scaling, key) for key in ROPE_KEYS[scaling.rope_type]},
        **optional,
    }


def _float(value: Any) -> Any:
    """A number as float, since JSON may write 10000.0 as 10000; the rules report invalid values."""
    return float(value) if is_positive_number(value) else value


def _scalar_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


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
    if not (is_positive_int(hidden) and is_positive_int(heads)):
        return None
    if hidden % heads:
        problems.append(
            f"missing head_dim: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def _attention_bias(config: Mapping[str, Any], problems: list[str]) -> Any:
    if config["model_type"] != "qwen2":
        return _required(config, "attention_bias", problems)
    if config.get("attention_bias", True) is not True:
        problems.append(
            f"unsupported attention_bias: got {config['attention_bias']!r}, expected absent or true for qwen2"
        )
    return True


def _rope(config: Mapping[str, Any], problems: list[str]) -> tuple[Any, RopeScaling | None]:
    """rope_theta and the scaling, from either spelling; a disagreement of the two is a problem."""
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
    """[RopeScaling], [None] for the plain embedding, or [] if a problem was added."""
    kinds = {
        value[name]
        for name in ("rope_type", "type")
        if value.get(name) is not None and isinstance(value[name], str)
    }
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind not in ROPE_KEYS:
        got = value.get("rope_type", value.get("type"))
        problems.append(f"unsupported {key}.rope_type: got {got!r}, expected one of {list(ROPE_KEYS)}")
        return []
    wanted, optional = ROPE_KEYS[kind], ROPE_OPTIONS.get(kind, ())
    missing = [
        f"missing {key}.{name}: config.json must state it" for name in wanted if value.get(name) is None
    ]
    known = {"rope_type", "type", "rope_theta", *wanted, *optional}
    harmless = (("partial_rotary_factor", 1.0),)
    extra = [
        (name, v)
        for name, v in value.items()
        if name not in known and v is not None and (name, v) not in harmless
    ]
    problems += missing + [
        f"unsupported {key}.{name}: got {v!r} with rope_type {kind!r}, expected absent" for name, v in extra
    ]
    if missing or extra:
        return []
    if kind == "default":
        return [None]
    stated = {name: value[name] for name in (*wanted, *optional) if value.get(name) is not None}
    try:
        return [
            RopeScaling(kind, **{name: v if name in ROPE_RULES else _float(v) for name, v in stated.items()})
        ]
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
