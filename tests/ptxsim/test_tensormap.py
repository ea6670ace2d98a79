"""Tensor maps made on the device.  PTX ISA: tensormap.replace, tensormap.cp_fenceproxy."""

from __future__ import annotations

import harness
import numpy as np
import pytest

import ptxsim
from ptxsim import tensor_maps

TILE = "tensormap.replace.tile"
MAP = """
.shared .align 128 .b8 map[128]; .reg .b32 %t, %s, %r; .reg .b64 %q, %v; .reg .pred %p;
mov.u32 %t, %tid.x; mov.u32 %s, map; mad.lo.u32 %r, %t, 4, %s; st.shared.b32 [%r], 0;
bar.sync 0;
setp.ne.u32 %p, %t, 0;
@%p bra MADE;
"""
COPY = """
MADE:
bar.warp.sync -1;
ld.param.u64 %q, [out]; cvt.u64.u32 %v, %s;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
    [%q], [%v], 128;
fence.proxy.tensormap::generic.acquire.gpu [%q], 128;
"""


def made(lines: list[str]) -> bytes:
    """The map that one thread makes by these instructions, as the warp publishes it."""
    raw = np.zeros(256, np.uint8)
    out = raw[-raw.ctypes.data % 128 :][:128]
    text = harness.kernel(f"{MAP}{chr(10).join(lines)}{COPY}", [".u64 out"])
    ptxsim.load(text).launch(1, 32, [out])
    return out.tobytes()


def replace(field: str, *values: str, wide: bool = False) -> str:
    return f"{TILE}.{field}.shared::cta.b1024.b{64 if wide else 32} [%s], {', '.join(values)};"


def number(field: str, mode: int, value: int, wide: bool = False) -> str:
    register = "%q" if wide else "%r"
    move = f"mov.b{64 if wide else 32} {register}, {value};"
    return f"{move} {replace(field, str(mode), register, wide=wide)}"


@pytest.mark.parametrize(
    ("element", "code", "item"), [("bf16", 10, 2), ("f32", 7, 4), ("u8", 0, 1), ("f64", 9, 8)]
)
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_every_field_lands_where_the_host_puts_it(
    element: str, code: int, item: int, swizzle: int
) -> None:
    address, dims, strides = 0x7F1234567890 & ~15, (1000, 77, 3), (4096, (1 << 33) + 32)
    box = (max(16, (16, 32, 64, 128)[swizzle]) // item, 17, 2)
    lines = [
        f"mov.b64 %q, {address}; {replace('global_address', '%q', wide=True)}",
        replace("rank", "2"),
        replace("elemtype", str(code)),
        replace("interleave_layout", "0"),
        replace("swizzle_mode", str(swizzle)),
        replace("fill_mode", "1"),
        *(number("global_dim", n, d) for n, d in enumerate(dims)),
        *(number("box_dim", n, b) for n, b in enumerate(box)),
        *(number("element_stride", n, 1) for n in range(3)),
        *(number("global_stride", n, s, wide=True) for n, s in enumerate(strides)),
    ]
    span = tensor_maps.SWIZZLE_SPANS[swizzle]
    host = tensor_maps.encode(address, element, dims, strides, box, span, nan_fill=True)
    assert tensor_maps.decode(made(lines)) == tensor_maps.decode(host)
    again = made([*lines, number("box_dim", 1, 9), replace("fill_mode", "0")])
    host = tensor_maps.encode(address, element, dims, strides, (box[0], 9, 2), span)
    assert tensor_maps.decode(again) == tensor_maps.decode(host)


def test_wrong_values_are_errors() -> None:
    with pytest.raises(ptxsim.UnsupportedInstruction, match="immediate below 5"):
        made([number("box_dim", 5, 1)])
    with pytest.raises(ptxsim.UnsupportedInstruction, match="immediate below 5"):
        made([replace("rank", "7")])
    with pytest.raises(ptxsim.InvalidOperand, match="multiple of 16"):
        made([number("global_stride", 0, 24, wide=True)])
    with pytest.raises(ptxsim.Misaligned, match="64-byte aligned"):
        made(["add.u32 %s, %s, 4;", replace("rank", "1")])
