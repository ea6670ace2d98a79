"""What a tile of the backward costs each pipe of an SM at its peak. No DSL here.

A tile is 128 rows (queries of the task times heads of the group) by 128 keys, with head dims of
128; masked or empty rows cost as much as others.

**Tensor pipe.** Five products of 128 x 128 x 128 (S, dP, dV, dK, dQ), 2 * 128^3 FLOP each, at 8,192
dense 16-bit FLOP a cycle: 5 * 512 = 2,560 cycles. (B200: 2.25 PFLOP/s of dense bf16 over 148 SMs at
1.85 GHz are 8,217.) What is issued is counted from the code: its instructions have shapes, and a
product whose sums start anew in the same columns from the same first operand, at two places of one
turn of the loop, is at each turn issued at one of them only, since the later one would throw the
earlier one's sums away. So these count once. Products before the loop belong to the first tile.

**Shared memory**, 128 bytes a cycle:

- Operands. An instruction of 128 x 128 x 16 takes 64 cycles and reads 4 KiB of each operand that
  lies in shared memory. A product with both there (S, dP, dQ) reads 64 KiB in its 512 cycles, which
  is all there is; with the first operand in tensor memory (dV, dK) it reads 32 KiB, in 256.
- The copy engine writes Q and dO, 32 KiB each. K and V come once a run and are left out here.
- dS is written once, 32 KiB, free of bank conflicts by its swizzle.
- lse and delta: each of 8 warps reads the 2 * 64 of its rows, four with an instruction, a cycle
  each as all lanes read the same. (The PTX loads them singly; ptxas makes 32 LDS.128 of them.)

P goes through tensor memory, and dQ from tensor memory through registers to L2: no shared memory.

**Exponentials.** 128 * 128, at 16 a cycle; at 32 on sm_103 (B300: 10.7e12 a second against 5e12).

**L2.** A tile reads Q, dO, lse and delta, and adds 128 * 128 fp32 parts of dq. A run of tiles with
the same keys reads K and V and adds dK and dV in fp32; where sums are ordered, a run that goes on
with a result reads it first. Indices (some hundred bytes) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from openmsa.contract.tasks import TILE_ROWS
from openmsa.kernels.build import Build, Roofline
from openmsa.kernels.common.instructions import Product
from openmsa.kernels.sm100.backward.config import BLOCK, HEAD_DIM, Warps

__all__ = ["issued", "roofline"]

FLOP_PER_CYCLE = 8192
SHARED_BYTES_PER_CYCLE = 128
EXPONENTIALS_PER_CYCLE = {"sm_100a": 16, "sm_103a": 32}

_WIDTH = 2  # bytes of an operand's element
_VECTOR = 4  # numbers that one load of a warp reads
_PRODUCTS = {"S": "SS", "dP": "SS", "dV": "TS", "dK": "TS", "dQ": "SS"}
"""Where the first operand of each product lies."""


def roofline(build: Build, products: Sequence[Product] = ()) -> Roofline:
    """Cycles and bytes of a tile on one SM; ``products`` are what the code has, as compiled, or
    nothing for the five that it needs."""
    rows, keys, width = TILE_ROWS, BLOCK, HEAD_DIM
    tile = rows * width * _WIDTH
    flop = 2 * rows * keys * width
    needed = len(_PRODUCTS) * flop // FLOP_PER_CYCLE
    turn = issued(products)
    operands = {
        f"{name} ({source})": (keys * width * _WIDTH + tile * (source == "SS"))
        // SHARED_BYTES_PER_CYCLE
        for name, source in _PRODUCTS.items()
    }
    if turn:
        operands = {"operands": sum(map(_operand_bytes, turn)) // SHARED_BYTES_PER_CYCLE}
    warps = Warps.REDUCE - Warps.COMPUTE
    shared = {
        **operands,
        "Q and dO by the copy engine": 2 * tile // SHARED_BYTES_PER_CYCLE,
        "dS": rows * keys * _WIDTH // SHARED_BYTES_PER_CYCLE,
        "lse and delta": warps * 2 * (rows // 2) // _VECTOR,
    }
    tensor = sum(2 * p.m * p.n * p.k for p in turn) // FLOP_PER_CYCLE if turn else needed
    exponentials = rows * keys // EXPONENTIALS_PER_CYCLE[build.arch]
    block, ordered = keys * width, dict(build.facts)["deterministic"]
    return Roofline(
        unit=f"tile of {rows} rows by {keys} keys",
        needed=needed,
        cycles={
            "tensor": {"products as issued" if turn else "products": tensor},
            "shared memory": shared,
            "exponentials": {"P": exponentials},
        },
        bytes={
            "read a tile": 2 * tile + 2 * rows * 4,
            "added to a tile": rows * width * 4,
            "read a run": 2 * block * _WIDTH + (2 * block * 4 if ordered else 0),
            "added to a run": 2 * block * 4,
        },
    )


def issued(products: Sequence[Product]) -> tuple[Product, ...]:
    """The instructions of one turn of the loop over tiles: those of the deepest loop that has any,
    of several places with the same sums and first operand the one with the most."""
    depth = max((product.loop for product in products), default=0)
    places: list[list[Product]] = []
    for product in products:
        if product.loop == depth and depth:
            # A place is a sequence with one target: another target, or none of it, in between.
            if not places or places[-1][0].target != product.target:
                places.append([])
            places[-1].append(product)
    turn: dict[tuple[str, str], list[Product]] = {}
    for place in places:
        key = (place[0].target, place[0].first)
        turn[key] = max(turn.get(key, []), place, key=len)
    return tuple(product for place in turn.values() for product in place)


def _operand_bytes(product: Product) -> int:
    second = product.n * product.k * _WIDTH
    return second + (product.m * product.k * _WIDTH if product.source == "SS" else 0)
