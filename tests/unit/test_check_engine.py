"""The contract's golden vectors: made by the oracle, kept by the trainer and by vLLM with the plugin, and able to tell others."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from bridge import check_engine
from jetrl_jax.errors import RunStopped, UserError
from tests.oracles import contract_oracle, fp8_oracle


def test_contract_file_is_what_the_oracle_makes():
    assert json.loads(check_engine.CONTRACT.read_text(encoding="utf-8")) == contract_oracle.contract()


@pytest.mark.parametrize("scale_format", ["float32", "power_of_two"])
@pytest.mark.parametrize("order", ["deepgemm", "triton"])
def test_trainer_keeps_the_contract(scale_format, order):
    rows = check_engine.trainer_rows(check_engine.load_contract(), scale_format, order)
    assert [row for row in rows if row.different] == []
    assert len(rows) == 9 and all(row.values and row.required for row in rows)


def quantize_by(scale_of):
    """A quantiser of rows whose scale is another formula's."""

    def run(bits):
        x = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        scales = np.stack([scale_of(np.abs(x[:, at : at + 128]).max(1)) for at in range(0, x.shape[1], 128)], 1)
        wide = np.repeat(scales, 128, 1)[:, : x.shape[1]]
        return fp8_oracle.encode_by_cast(np.clip(x / wide, -448, 448)), scales

    return run


@pytest.mark.parametrize(
    ("scale_of", "caught"),
    [
        (lambda amax: np.maximum(amax, np.float32(1e-10)) / np.float32(448), set()),
        (lambda amax: np.maximum(amax / np.float32(448), np.float32(1 / (448 * 512))), {"floor", "zero_block"}),
        (lambda amax: np.maximum(amax, np.float32(1e-10)) * np.float32(1 / 448), {"division"}),
    ],
    ids=["contract", "other_floor", "reciprocal"],
)
def test_other_formulas_are_told_apart(scale_of, caught):
    rows = check_engine.quantizer_rows(check_engine.load_contract(), "trainer", quantize_by(scale_of), "float32", "", True)
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
    pytest.importorskip("vllm", reason="the contract is run against the real vLLM, and vllm is not installed")
    assert check_engine.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    (native,) = [line.split() for line in lines if line.startswith("vllm/cpu_native") and " floor " in line]
    assert int(native[2]) > 0
    assert check_engine.main(["--set", "precision.scale_format=power_of_two", "--set", "precision.promotion_order=triton"]) == 0
    monkeypatch.setattr("bridge.engine.vllm_kernel.AMAX_FLOOR", 1e-4)
    with pytest.raises(RunStopped, match=r"plugin/float32: floor"):
        check_engine.main([])
