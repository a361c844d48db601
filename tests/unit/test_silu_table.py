"""The table of SiLU has the bits of the float64 formula for every 16-bit gate, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.models import ops
from jetrl_jax.precision.parameters import jit

pytestmark = pytest.mark.as_the_product


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_table_of_silu_matches_the_formula_for_every_gate(dtype: jnp.dtype) -> None:
    gates = jnp.asarray(np.arange(1 << 16, dtype=np.uint16).view(dtype))
    formula = jit(lambda gate: ops._silu(None, True, gate.astype(jnp.float32)))(gates)
    looked_up = jit(ops._silu_by_table)(gates)
    np.testing.assert_array_equal(np.isnan(looked_up), np.isnan(formula))
    known = ~np.isnan(formula)
    np.testing.assert_array_equal(
        np.asarray(looked_up)[known].view(np.uint32), np.asarray(formula)[known].view(np.uint32)
    )


def test_gradient_of_the_table_is_the_formulas() -> None:
    gates = jnp.linspace(-9, 9, 257).astype(jnp.bfloat16)

    def total(silu: object) -> jax.Array:
        return jit(jax.grad(lambda gate: (silu(gate) * jnp.float32(0.37)).sum()))(gates)  # type: ignore[operator]

    looked_up = total(ops._silu_by_table)
    formula = total(lambda gate: ops._silu(None, True, gate.astype(jnp.float32)))
    np.testing.assert_array_equal(np.asarray(looked_up), np.asarray(formula))
    assert np.abs(np.asarray(looked_up, np.float32)).max() > 0.3
