"""The count of a compiled program: the reader of XLA's text against bytes and FLOPs written out by hand."""

from __future__ import annotations

import pytest

from jetrl_jax.commands.plan import main
from jetrl_jax.errors import UserError
from jetrl_jax.planning.count import Amount, combined, counted, total
from jetrl_jax.planning.hlo import Program

TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,256]{1,0})->f32[8,256]{1,0}}

%sliced (p0: f32[8,256], p1: s32[]) -> bf16[1,256] {
  %p0 = f32[8,256]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,256}
  ROOT %narrow = bf16[1,256]{1,0} convert(%row), metadata={op_name="jit(f)/convert_element_type"}
}

%updated (p0.1: f32[8,256], p1.1: bf16[1,256], p2.1: s32[]) -> f32[8,256] {
  %p0.1 = f32[8,256]{1,0} parameter(0)
  %p1.1 = bf16[1,256]{1,0} parameter(1)
  %wide = f32[1,256]{1,0} convert(%p1.1)
  %p2.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %written = f32[8,256]{1,0} dynamic-update-slice(%p0.1, %wide, %p2.1, %zero.1)
}

%product (p0.2: bf16[1,256], p1.2: bf16[512,256]) -> (f32[1,512], pred[1,512]) {
  %p0.2 = bf16[1,256]{1,0} parameter(0)
  %p1.2 = bf16[512,256]{1,0} parameter(1)
  %dot = f32[1,512]{1,0} dot(%p0.2, %p1.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %positive = pred[1,512]{1,0} compare(%dot, %dot), direction=GT
  ROOT %both = (f32[1,512]{1,0}, /*index=1*/pred[1,512]{1,0}) tuple(%dot, %positive)
}

%given_a_row (p0.3: f32[8,256], p1.3: s32[]) -> f8e4m3fn[1,256] {
  %p0.3 = f32[8,256]{1,0} parameter(0)
  %p1.3 = s32[] parameter(1)
  %zero.3 = s32[] constant(0)
  %row.3 = f32[1,256]{1,0} dynamic-slice(%p0.3, %p1.3, %zero.3), dynamic_slice_sizes={1,256}
  ROOT %inside = f8e4m3fn[1,256]{1,0} custom-call(%row.3), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/jit(requantize)/anonymous/mpmd_map"}
}

%turn (carry: (s32[], f32[8,256])) -> (s32[], f32[8,256]) {
  %carry = (s32[], f32[8,256]{1,0}) parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  %array = f32[8,256]{1,0} get-tuple-element(%carry), index=1
  %one = bf16[1,256]{1,0} fusion(%array, %index), kind=kLoop, calls=%sliced
  %all = f32[8,256]{1,0} fusion(%array, %one, %index), kind=kLoop, calls=%updated
  ROOT %next = (s32[], f32[8,256]{1,0}) tuple(%index, %all)
}

%more (carry.1: (s32[], f32[8,256])) -> pred[] {
  %carry.1 = (s32[], f32[8,256]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8,256], w: bf16[512,256]) -> f32[8,256] {
  %x = f32[8,256]{1,0} parameter(0)
  %w = bf16[512,256]{1,0} parameter(1)
  %start = s32[] constant(0)
  %codes = (f8e4m3fn[8,256]{1,0}, f32[2,8]{1,0}) custom-call(%x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/jvp(jit(quantize))/anonymous/mpmd_map"}
  %a = f8e4m3fn[8,256]{1,0} get-tuple-element(%codes), index=0
  %sa = f32[2,8]{1,0} get-tuple-element(%codes), index=1
  %sb = f32[1,2]{1,0} broadcast(%start), dimensions={}
  %b = f8e4m3fn[128,256]{1,0} fusion(%w), kind=kInput, calls=%sliced
  %mm = bf16[8,128]{1,0} custom-call(%a, %b, %sa, %sb), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/jvp(jit(matmul))/_body/mpmd_map"}
  %first = (s32[], f32[8,256]{1,0}) tuple(%start, %x)
  %loop = (s32[], f32[8,256]{1,0}) while(%first), condition=%more, body=%turn, \
backend_config={"known_trip_count":{"n":"8"}}
  %sliced.1 = f8e4m3fn[1,256]{1,0} fusion(%x, %start), kind=kCustom, calls=%given_a_row
  %row.1 = bf16[1,256]{1,0} bitcast(%mm)
  %logits = (f32[1,512]{1,0}, pred[1,512]{1,0}) fusion(%row.1, %w), kind=kCustom, calls=%product
  ROOT %out = f32[8,256]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_launches_and_their_bytes_are_read_off_the_text() -> None:
    found = {one.instruction.name: (one.times, one.bytes) for one in Program(TEXT).launches()}
    assert found == {
        "codes": (1, 8 * 256 * 4 + 8 * 256 + 2 * 8 * 4),
        "sb": (1, 4 + 2 * 4),
        "b": (1, 256 * 4 + 4 + 256 * 2),  # of `sliced`, whatever it is called on: a row read, and written
        "mm": (1, 8 * 256 + 128 * 256 + 2 * 8 * 4 + 2 * 4 + 8 * 128 * 2),
        "one": (8, 256 * 4 + 4 + 256 * 2),  # the row alone of what it is sliced from
        "all": (8, 256 * 2 + 4 + 256 * 4),  # in place: the row alone
        "inside": (1, 256 * 4 + 4 + 256),  # the kernel, and not the fusion that gives it a row
        "logits": (1, 256 * 2 + 512 * 256 * 2 + 512 * 4 + 512),
    }


def test_launches_are_told_apart_and_take_the_longest_of_their_times() -> None:
    found = {one.instruction.name: counted(one) for one in Program(TEXT).launches()}
    kinds = {name: kind for name, (kind, _) in found.items()}
    assert kinds == {
        "codes": "quantisers",
        "sb": "others by XLA",
        "b": "turned codes",
        "mm": "FP8 FProp, DGrad",
        "one": "others by XLA",
        "all": "others by XLA",
        "inside": "quantisers",
        "logits": "16-bit products",
    }
    assert found["mm"][1].flops == 2 * 8 * 128 * 256 and found["logits"][1].flops == 2 * 512 * 256
    assert found["one"][1].seconds == 2e-6  # no launch is shorter


def test_counts_add_and_multiply() -> None:
    a, b = {"x": Amount(1, 2, 3, 4)}, {"x": Amount(1, 1, 1, 1), "y": Amount(2, 0, 0, 1)}
    assert combined(a, b, 2) == {"x": Amount(3, 4, 5, 6), "y": Amount(4, 0, 0, 2)}
    assert total(b) == Amount(3, 1, 1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "1xH200"], "--count: not counted for: got --devices 1xH200, expected 1xH100"),
        (["--devices", "2xH100", "--set", "sharding.data=2"], "--count: several devices: .* Try"),
        (
            ["--devices", "1xH100", "--set", "precision.overrides=[{pattern: '*', format: bf16}]"],
            "layers differ",
        ),
    ],
)
def test_count_refuses_what_it_cannot_count(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main([*words, "--count", "--set", "precision.preset=fp8_unified"])
