"""Runs PTX bodies on many operand values: the ground that the per-instruction tests stand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chip
import numpy as np

import ptxsim

WARP = 32
HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
Array = np.ndarray


def kernel(body: str, params: Sequence[str] = (), registers: str = "", name: str = "k") -> str:
    """A module with one kernel; `params` are `.u64 p`-like declarations without `.param`."""
    declared = ", ".join(f".param {p}" for p in params)
    return f"{HEADER}.visible .entry {name}({declared})\n{{\n{registers}\n{body}\nret;\n}}\n"


def _register(kind: str, name: str, dtype: np.dtype[Any]) -> str:
    width = "pred" if dtype.kind == "b" else f"b{max(16, 8 * dtype.itemsize)}"
    return f".reg .{width} %{kind}{name};"


def _load(number: int, dtype: np.dtype[Any], uniform: bool) -> str:
    index = "%same" if uniform else "%each"
    size = dtype.itemsize
    lines = [
        f"ld.param.u64 %at, [in{number}];",
        f"mad.wide.u32 %at, {index}, {size}, %at;",
    ]
    if dtype.kind == "b":
        lines += ["ld.global.u8 %byte, [%at];", f"setp.ne.u16 %a{number}, %byte, 0;"]
    else:
        lines.append(f"ld.global.b{8 * size} %a{number}, [%at];")
    return "\n".join(lines)


def _store(number: int, dtype: np.dtype[Any]) -> str:
    size = dtype.itemsize
    lines = [
        f"ld.param.u64 %at, [out{number}];",
        f"mad.wide.u32 %at, %each, {size}, %at;",
    ]
    if dtype.kind == "b":
        lines += [f"selp.u16 %byte, 1, 0, %d{number};", "st.global.u8 [%at], %byte;"]
    else:
        lines.append(f"st.global.b{8 * size} [%at], %d{number};")
    return "\n".join(lines)


def instruction_text(
    body: str, inputs: Sequence[Any], outputs: Sequence[Any], uniform: Sequence[bool] = ()
) -> str:
    """The kernel that `run` launches: `body` reads %a0.. and writes %d0.. once per thread."""
    uniform = tuple(uniform) or (False,) * len(inputs)
    dtypes = [np.dtype(i) for i in inputs]
    wanted = [np.dtype(o) for o in outputs]
    registers = [
        ".reg .b32 %each, %same, %lane, %x, %y;\n.reg .b64 %at;",
        ".reg .b16 %byte;\n.reg .pred %act;",
        *(_register("a", str(n), d) for n, d in enumerate(dtypes)),
        *(_register("d", str(n), d) for n, d in enumerate(wanted)),
    ]
    lines = [
        "mov.u32 %each, %ctaid.x;\nmov.u32 %x, %ntid.x;\nmul.lo.u32 %same, %each, %x;",
        "mov.u32 %lane, %laneid;\nmov.u32 %x, %tid.x;\nadd.u32 %each, %same, %x;",
        "mov.u32 %x, %warpid;\nmad.lo.u32 %same, %x, 32, %same;",
        *(_load(n, d, u) for n, (d, u) in enumerate(zip(dtypes, uniform, strict=True))),
        body,
        *(_store(n, d) for n, d in enumerate(wanted)),
    ]
    params = [f".u64 in{n}" for n in range(len(dtypes))] + [
        f".u64 out{n}" for n in range(len(wanted))
    ]
    return kernel("\n".join(lines), params, "\n".join(registers))


def run(
    body: str,
    inputs: Sequence[Array],
    outputs: Sequence[Any],
    uniform: Sequence[bool] = (),
    seed: int = 0,
    strict: bool = False,
    real: bool = True,
    slack: Sequence[Array] = (),
) -> list[Array]:
    """Run `body` once per element; each warp sees 32 elements.

    `uniform[i]` makes all lanes of a warp read its first element of input i, in the simulator a
    Python integer rather than 32 lanes; `spread` gives the values that are then read.  With
    PTXSIM_CHIP=1 a GPU runs the same kernel and must agree, within `slack` for float32 sums that
    may be formed in any order; not if `real` is False: where the ISA leaves the result open.
    """
    count = len(inputs[0])
    assert count % WARP == 0
    block = min(count, 1024)
    assert count % block == 0
    text = instruction_text(body, [i.dtype for i in inputs], outputs, uniform)
    results = [np.zeros(count, np.dtype(o)) for o in outputs]
    arrays = [np.ascontiguousarray(i) for i in inputs]
    ptxsim.load(text).launch(count // block, block, [*arrays, *results], seed=seed, strict=strict)
    if chip.WANTED and real:
        before = [np.zeros_like(r) for r in results]
        chip.compare(text, count // block, block, arrays, before, results, slack)
    return results


def spread(values: Array, uniform: bool) -> Array:
    """What each thread reads of an input: its own element, or its warp's first one."""
    return np.repeat(values[::WARP], WARP) if uniform else values


def mixtures(count: int) -> list[tuple[bool, ...]]:
    """All operands per lane; all uniform; and each operand alone uniform and alone per lane."""
    found = [(False,) * count, (True,) * count]
    for number in range(count):
        one = tuple(n == number for n in range(count))
        found += [one, tuple(not o for o in one)]
    return list(dict.fromkeys(found))
