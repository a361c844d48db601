"""The block-scaled product A Bᵀ for few rows of A: the weights' rows are the tensor core's rows.

One wgmma has at least 64 rows. With eight tokens as rows, most of it would multiply zeros; as columns they
cost only eight. The tile of the result is transposed when it is stored. Sums, orders and bits are those of
`mosaic_tiles`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import BLOCK, E4M3
from pallas_kernels.gemm.config import TuningConfig
from pallas_kernels.hopper import WGMMA_ROWS
from pallas_kernels.mosaic_common import launch, tile

_TOKEN_SCALES = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class SwappedGemm:
    """One kernel for `tile_m` tokens and 64 rows of B [n, k] per program; B has a scale per (128, 128) block.

    Attributes: as `mosaic_tiles.TiledGemm`, without `per_column`.
    """

    m: int
    n: int
    blocks: int
    promotion_order: str
    out_dtype: Any
    config: TuningConfig

    def __call__(
        self, a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, *, interpret: bool = False
    ) -> jax.Array:
        """[m, n] in `out_dtype`, from the arguments of `TiledGemm`."""
        config = self.config
        tokens, stages = config.tile_m, config.stages
        return launch(
            self._body,
            interpret=interpret,
            out_type=jax.ShapeDtypeStruct((self.m, self.n), self.out_dtype),
            grid=(pl.cdiv(self.n, WGMMA_ROWS), pl.cdiv(self.m, tokens)),
            grid_names=("weights", "tokens"),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types={
                "a_smem": tile(tokens, BLOCK, E4M3, (stages,)),
                "b_smem": tile(WGMMA_ROWS, BLOCK, E4M3, (stages,)),
                "a_scale_smem": plgpu.SMEM((self.blocks, tokens), jnp.float32),
                "out_smem": plgpu.SMEM(
                    (tokens, WGMMA_ROWS), self.out_dtype, transforms=self._out_transforms()
                ),
                "full_barrier": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                "empty_barrier": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
                "scale_barrier": plgpu.Barrier(),
            },
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        )(a, b, a_scale, b_scale)

    def _out_transforms(self) -> tuple[Any, ...]:
        """The layout of the result's tile: shared-memory rows of 128 bytes."""
        return plgpu.TilingTransform((8, 128 // jnp.dtype(self.out_dtype).itemsize)), plgpu.SwizzleTransform(
            128
        )

    def _body(
        self,
        a_gmem: Any,
        b_gmem: Any,
        a_scale_gmem: Any,
        b_scale_gmem: Any,
        out_gmem: Any,
        *,
        a_smem: Any,
        b_smem: Any,
        a_scale_smem: Any,
        out_smem: Any,
        full_barrier: Any,
        empty_barrier: Any,
        scale_barrier: Any,
    ) -> None:
        stages = self.config.stages
        first_row = lax.axis_index("weights") * WGMMA_ROWS
        weights = pl.ds(first_row, WGMMA_ROWS)
        tokens = pl.ds(lax.axis_index("tokens") * self.config.tile_m, self.config.tile_m)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _produce() -> None:
            plgpu.copy_gmem_to_smem(a_scale_gmem.at[:, tokens], a_scale_smem, scale_barrier)

            @pl.loop(0, self.blocks)
            def _block(block: jax.Array) -> None:
                slot = lax.rem(block, jnp.int32(stages))

                @pl.when(block >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty_barrier.at[slot])

                depth = pl.ds(block * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(b_gmem.at[weights, depth], b_smem.at[slot], full_barrier.at[slot])
                plgpu.copy_gmem_to_smem(a_gmem.at[tokens, depth], a_smem.at[slot], full_barrier.at[slot])

            @pl.loop(0, min(stages, self.blocks))
            def _drain(slot: jax.Array) -> None:
                plgpu.barrier_wait(empty_barrier.at[slot])

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _consume() -> None:
            def weight_scale(block: Any) -> jax.Array:
                return b_scale_gmem[first_row // BLOCK, jnp.minimum(jnp.int32(block), self.blocks - 1)]

            def add_block(
                block: jax.Array, carry: tuple[jax.Array, jax.Array]
            ) -> tuple[jax.Array, jax.Array]:
                total, scale = carry
                slot = lax.rem(block, jnp.int32(stages))
                ahead = weight_scale(block + 1)
                token_scale = plgpu.load(a_scale_smem.at[block], layout=_TOKEN_SCALES)
                plgpu.barrier_wait(full_barrier.at[slot])

                def multiply(accumulator: Any) -> jax.Array:
                    plgpu.wgmma(accumulator, b_smem.at[slot], a_smem.at[slot].transpose((1, 0)))
                    return accumulator[...]

                dot = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, self.config.tile_m), jnp.float32))
                plgpu.barrier_arrive(empty_barrier.at[slot])
                return self._promote(total, dot, token_scale, scale), ahead

            zero = plgpu.layout_cast(
                jnp.zeros((WGMMA_ROWS, self.config.tile_m), jnp.float32), plgpu.Layout.WGMMA
            )
            plgpu.barrier_wait(scale_barrier)
            total, _ = lax.fori_loop(0, self.blocks, add_block, (zero, weight_scale(0)))
            turned = plgpu.layout_cast(total.astype(self.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            out_smem.transpose((1, 0))[...] = turned
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[tokens, weights])
            plgpu.wait_smem_to_gmem(0)

    def _promote(
        self, total: jax.Array, dot: jax.Array, token_scale: jax.Array, weight_scale: jax.Array
    ) -> jax.Array:
        """The sums after one more block of dots, in the orders of `mosaic_tiles`."""
        if self.promotion_order == "triton":
            return total + (dot * lax.broadcast_in_dim(token_scale, dot.shape, [1])) * weight_scale
        return total + dot * lax.broadcast_in_dim(token_scale * weight_scale, dot.shape, [1])
