"""The count of a kernel's instructions: on a listing written by hand, and of the products for an H100."""

from __future__ import annotations

import pytest

from tests.benchmarks import instructions
from tests.benchmarks.instructions import Assembly

LISTING = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64 P0, [R2+URZ], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0030*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ, !UPT ;
        /*0040*/                   LDS.64 R2, [R3] ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   FMUL R4, R2, R3 ;
        /*0070*/                   FFMA R5, R4, R24, R5 ;
        /*0080*/                   FFMA.FTZ R6, R4, R25, R6 ;
        /*0090*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00a0*/                   UISETP.NE.AND UP0, UPT, UR4, UR5, UPT ;
        /*00b0*/                   PLOP3.LUT P1, PT, PT, PT, UP0, 0x80, 0x0 ;
        /*00c0*/               @P1 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_3:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3 ;
        /*00f0*/              @!P0 BRA `(.L_x_3) ;
        /*0100*/                   BRA `(.L_x_1) ;
"""


def test_a_listing_is_read() -> None:
    """The loop, but neither the wait for a barrier nor the way back from it; what follows the product's wait."""
    code = Assembly.of(LISTING)
    assert len(code.names) == 17 and code.loops == ((1, 12),) and code.product_loop == (1, 12)
    assert code.behind_the_wait == 7
    assert code.counted((1, 12)) == {
        **dict.fromkeys(("SYNCS", "QGMMA", "LDS", "WARPGROUP", "FMUL", "UIADD3", "UISETP", "PLOP3"), 1),
        "FFMA": 2,
        "BRA": 2,
    }
    assert code.executed((10,)) == 17 + 9 * 12
    with pytest.raises(ValueError, match=r"got 2 numbers of turns, expected one for each of \(\(1, 12\),\)"):
        code.executed((10, 2))


@pytest.mark.newest
@pytest.mark.long
@pytest.mark.skipif(instructions.problem() is not None, reason=str(instructions.problem()))
@pytest.mark.parametrize(
    ("name", "most"), [("FProp, DGrad", 70), ("WGrad, X in blocks", 70), ("WGrad by rows", 153)]
)
def test_products_promote_a_block_in_few_instructions(name: str, most: int) -> None:
    """Behind the wait stand 64 multiply-adds and, with a scale for each column, their 64 scales' products and
    16 loads; the tile's prototype had 153 and spilled (docs/log.md).
    """
    ((report, code),) = instructions.found(name)
    assert report.clean, report.text
    assert code.behind_the_wait <= most
    assert sum(code.counted(code.product_loop)[name] for name in instructions.TENSOR) == 4
