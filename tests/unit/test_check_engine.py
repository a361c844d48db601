"""The contract's golden vectors: made by the oracle, kept by the trainer and by vLLM with the plugin, and
able to tell others.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetrl_jax.commands import check_engine
from jetrl_jax.diagnostics import trainer_operators
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.models import attention, dense, ops, vocabulary
from tests.oracles import contract_oracle, fp8_oracle

pytestmark = pytest.mark.as_the_product


def test_contract_file_is_what_the_oracle_makes():
    assert json.loads(check_engine.CONTRACT.read_text(encoding="utf-8")) == contract_oracle.contract()


@pytest.mark.parametrize("scale_format", ["float32", "power_of_two"])
@pytest.mark.parametrize("order", ["deepgemm", "triton"])
def test_trainer_keeps_the_contract(scale_format, order):
    rows = check_engine.trainer_rows(check_engine.load_contract(), scale_format, order)
    assert [row for row in rows if row.different] == []
    assert len(rows) == 9 and all(row.values and row.required for row in rows)


def test_trainers_operators_keep_the_contract():
    rows = check_engine.operator_rows(check_engine.load_contract(), "trainer", trainer_operators.run, "cuda")
    assert [row for row in rows if row.different or not row.values] == []
    assert {row.case for row in rows if not row.required} == {"norm native"}


def test_other_roundings_are_told_apart(monkeypatch):
    """Each operator's rounding taken away in the trainer breaks the vectors of that operator."""
    contract = check_engine.load_contract()

    def broken():
        return {
            row.case
            for row in check_engine.operator_rows(contract, "trainer", trainer_operators.run, "native")
            if row.different
        }

    def truncated(x, dtype):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)

    for module in (ops, attention):
        monkeypatch.setattr(module, "round_to", truncated)
    assert broken() >= {"norm native", "norm cuda", "rope", "rope linear", "rope llama3", "attention", "silu"}
    monkeypatch.undo()
    monkeypatch.setattr(dense, "round_to", truncated)
    assert broken() == {"linear with bias"}  # without a bias the product rounds by itself
    monkeypatch.undo()
    monkeypatch.setattr(
        vocabulary, "log_normalizer", lambda logits, **_: jax.nn.logsumexp(logits, axis=-1) * (1 + 2e-7)
    )
    assert broken() == {"head"}


def quantize_by(scale_of):
    """A quantiser of rows whose scale is another formula's."""

    def run(bits):
        x = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        scales = np.stack(
            [scale_of(np.abs(x[:, at : at + 128]).max(1)) for at in range(0, x.shape[1], 128)], 1
        )
        wide = np.repeat(scales, 128, 1)[:, : x.shape[1]]
        return fp8_oracle.encode_by_cast(np.clip(x / wide, -448, 448)), scales

    return run


@pytest.mark.parametrize(
    ("scale_of", "caught"),
    [
        (lambda amax: np.maximum(amax, np.float32(1e-10)) / np.float32(448), set()),
        (
            lambda amax: np.maximum(amax / np.float32(448), np.float32(1 / (448 * 512))),
            {"floor", "zero_block"},
        ),
        (lambda amax: np.maximum(amax, np.float32(1e-10)) * np.float32(1 / 448), {"division"}),
    ],
    ids=["contract", "other_floor", "reciprocal"],
)
def test_other_formulas_are_told_apart(scale_of, caught):
    rows = check_engine.quantizer_rows(
        check_engine.load_contract(), "trainer", quantize_by(scale_of), "float32", "", True
    )
    found = {row.case for row in rows if row.different}
    assert found >= caught and bool(found) == bool(caught)


def test_the_two_promotion_orders_are_told_apart():
    for case in check_engine.load_contract()["gemm"].values():
        assert case["deepgemm"] != case["triton"]


def test_missing_vllm_is_an_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        check_engine.main([])


def test_vllm_with_the_plugin_keeps_the_contract_and_without_it_does_not(capsys, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("vllm", reason="the contract is run against the real vLLM, and vllm is not installed")
    assert check_engine.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    (native,) = [line.split() for line in lines if line.startswith("vllm/cpu_native") and " floor " in line]
    assert int(native[2]) > 0
    changes = (
        "precision.scale_format=power_of_two",
        "precision.promotion_order=triton",
        "numerics.exact=false",
    )
    assert check_engine.main([word for change in changes for word in ("--set", change)]) == 0
    assert " rope" in "\n".join(lines) and " rope" not in capsys.readouterr().out, (
        "without exact the operators are vLLM's own"
    )
    monkeypatch.setattr("bridge.vllm.worker.fp8_kernel.AMAX_FLOOR", 1e-4)
    with pytest.raises(RunStopped, match=r"plugin/float32: floor"):
        check_engine.main([])
    monkeypatch.undo()
    from bridge.vllm.worker import exact_torch, operator_contract

    rotate = exact_torch.rotate

    def truncated(x, cos, sin):
        """As vLLM's library for AVX2 rounds."""
        wide = rotate(x.float(), cos, sin)
        return (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).to(x.dtype)

    monkeypatch.setattr(exact_torch, "rotate", truncated)
    rows = check_engine.operator_rows(check_engine.load_contract(), "vllm", operator_contract.run, "native")
    assert {row.case for row in rows if row.different} == {"rope", "rope linear", "rope llama3"}
