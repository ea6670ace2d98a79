"""The roofline of the SM100 backward: its arithmetic, and what it counts as issued."""

from __future__ import annotations

import pytest

from openmsa.kernels.build import Build, Roofline
from openmsa.kernels.common.instructions import Product
from openmsa.kernels.sm100.backward.roofline import issued, roofline


def build(arch: str = "sm_100a", deterministic: bool = False) -> Build:
    return Build("backward", arch, (("deterministic", deterministic),), lambda: (None, ()))


def place(target: str, first: str, loop: int = 1, count: int = 8) -> list[Product]:
    """One product of 128 x 128 x 128, in steps of 16."""
    source = "TS" if first.startswith("[") else "SS"
    steps = [first, *(f"{first}+{at}" for at in range(1, count))]
    return [Product(128, 128, 16, source, target, step, loop) for step in steps]


TURN = [
    *place("dv", "[p]"),
    *place("dk", "[ds]"),
    *place("s", "k"),
    *place("dq", "kt"),
    *place("s", "k"),  # the other branch
    *place("dp", "v"),
]
CODE = [*place("s", "k", loop=0), *place("dp", "v", loop=0), *TURN]


def test_what_a_tile_needs() -> None:
    found = roofline(build())
    assert found.needed == found.total("tensor") == 2560
    assert found.cycles["shared memory"] == {
        "S (SS)": 512, "dP (SS)": 512, "dV (TS)": 256, "dK (TS)": 256, "dQ (SS)": 512,
        "Q and dO by the copy engine": 512, "dS": 256, "lse and delta": 256,
    }  # fmt: skip
    assert found.total("exponentials") == 1024
    assert found.bytes == {
        "read a tile": 65536 + 1024,
        "added to a tile": 65536,
        "read a run": 65536,
        "added to a run": 131072,
    }


def test_sm103_has_twice_the_exponentials() -> None:
    assert roofline(build("sm_103a")).total("exponentials") == 512


def test_ordered_sums_read_what_they_add_to() -> None:
    found = roofline(build(deterministic=True))
    assert found.bytes["read a run"] == 65536 + 131072


def test_the_two_branches_of_a_turn_count_once_and_what_is_before_it_not() -> None:
    assert len(issued(CODE)) == 40
    found = roofline(build(), CODE)
    assert found.total("tensor") == found.needed
    assert found.total("shared memory") == roofline(build()).total("shared memory")


def test_work_done_twice_shows() -> None:
    again = roofline(build(), [*CODE, *place("s2", "k")])
    assert again.total("tensor") == 3072
    assert again.total("shared memory") == roofline(build()).total("shared memory") + 512
    wide = [Product(128, 256, 16, "SS", "s", "k", 1)] * 8
    assert roofline(build(), wide).total("tensor") == 1024


def test_an_operand_moved_to_shared_memory_shows() -> None:
    code = [*place("dv", "pt"), *TURN[8:]]
    more = roofline(build(), code).total("shared memory")
    assert more == roofline(build(), TURN).total("shared memory") + 256


@pytest.mark.parametrize("products", [[], place("s", "k", loop=0)])
def test_without_a_loop_nothing_is_known_of_what_is_issued(products: list[Product]) -> None:
    assert issued(products) == ()
    assert roofline(build(), products).total("tensor") == 2560


def test_the_pipe_that_takes_longest_bounds() -> None:
    cycles = {"a": {"x": 3, "y": 4}, "b": {"x": 6}, "c": {"x": 7}}
    assert Roofline("tile", 3, cycles, {}).bound == "a"
