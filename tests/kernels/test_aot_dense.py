"""The batch-invariant product compiled for an H100 that is not there: nothing spilled, no wgmma that waits
for another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.kernels import aot

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))


@pytest.mark.parametrize(
    ("sizes", "dtype", "out_dtype"),
    [
        ((8192, 4096, 4096), "bfloat16", "bfloat16"),
        ((8, 151936, 1024), "bfloat16", "float32"),
        ((1, 18992, 1024), "bfloat16", "float32"),  # an eighth of that vocabulary
        ((256, 6144, 4096), "float16", "float16"),
        ((100, 7, 72), "float16", "bfloat16"),
    ],
)
def test_kernels_compile_cleanly(sizes: tuple[int, int, int], dtype: str, out_dtype: str) -> None:
    from pallas_kernels.dense import mosaic

    (m, n, k) = sizes
    kind = jnp.dtype(out_dtype)
    operands = [jax.ShapeDtypeStruct((rows, k), dtype) for rows in (m, n)]
    program, (report,) = aot.program_and_reports(lambda x, w: mosaic.dense_matmul(x, w, kind), *operands)
    assert report.clean, report.text
    if n % 16 == 0:
        # W is read where it lies
        assert f"[{n},{k}]{{1,0}} pad(" not in program and f"[{n},{k}]{{1,0}} copy(" not in program


def test_kernel_compiles_inside_shard_map_and_remat() -> None:
    """Two H100 with half of the weight's rows each, forward and backward, the forward once more in the
    backward.
    """
    from pallas_kernels.dense import mosaic

    mesh, whole, split = aot.h100_mesh(2), PartitionSpec(), PartitionSpec("device")

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return mosaic.dense_matmul(x, w, jnp.bfloat16)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda saved, dy: (dy @ saved[1], dy.T @ saved[0]))

    def gradients(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            hidden = jax.checkpoint(lambda x, w: jnp.sin(product(jnp.cos(x), w)))(x, w)
            return jnp.square(hidden.astype(jnp.float32)).sum()

        dx, dw = jax.grad(loss, argnums=(0, 1))(x, w)
        return jax.lax.psum(dx, "device"), dw

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(whole, split), out_specs=(whole, split), check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 128), whole), ((512, 128), split))
    ]
    program = jax.jit(mapped).lower(*arguments).compile().as_text()
    assert sum("custom-call(" in line and "mosaic_gpu" in line for line in program.splitlines()) == 2
