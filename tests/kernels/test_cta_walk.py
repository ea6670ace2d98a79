"""The CTA walk, exhaustively: every row once, whole waves, a balanced tail, and a bound on both."""

from __future__ import annotations

import itertools
from array import array
from functools import cache
from operator import sub
from typing import NamedTuple

import pytest

from openmsa import InvalidInput
from openmsa.kernels.schedule import CtaWalk, cta_walk, grid_launch_bound, rows_per_cta

SMS = (1, 8, 132, 148)
SHORTEST = 3


def row_counts(num_sms: int) -> list[int]:
    """All counts up to 3000, then several hundred around and past 1, 2 and 3 long waves."""
    wave = 64 * num_sms
    past = [range(max(3001, n * wave - 40), n * wave + extra) for n, extra in ((1, 400), (2, 100))]
    past.append(range(max(3001, 3 * wave - 8), 3 * wave + num_sms))
    return sorted({*range(3001), *itertools.chain(*past)})


class Walked(NamedTuple):
    """A walk and what ``interval`` answered for each CTA of its grid."""

    walk: CtaWalk
    starts: array[int]
    stops: array[int]

    @property
    def sizes(self) -> list[int]:
        return list(map(sub, self.stops, self.starts))


@cache
def walked(num_sms: int) -> list[Walked]:
    """The walk of every row count, evaluated once for all tests."""
    found = []
    for rows in row_counts(num_sms):
        walk = cta_walk(rows, num_sms)
        intervals = [walk.interval(cta) for cta in range(walk.grid)]
        assert walk.rows == rows
        assert all(interval.step == 1 for interval in intervals)
        starts = array("i", [interval.start for interval in intervals])
        found.append(Walked(walk, starts, array("i", [interval.stop for interval in intervals])))
    return found


def ceil_div(value: int, by: int) -> int:
    return (value + by - 1) // by


@pytest.mark.parametrize("num_sms", SMS)
def test_every_row_is_walked_once_in_order(num_sms: int) -> None:
    for walk, starts, stops in walked(num_sms):
        assert [*starts, walk.rows] == [0, *stops], (walk, "a gap, an overlap or dropped rows")
        assert min(map(sub, stops, starts), default=1) >= 1, (walk, "a CTA without work")


@pytest.mark.parametrize("num_sms", SMS)
def test_surplus_ctas_find_nothing(num_sms: int) -> None:
    for walk, _, _ in walked(num_sms):
        for cta in (walk.grid, walk.grid + 1, walk.grid + num_sms, 10 * walk.grid + 1000):
            assert len(walk.interval(cta)) == 0, (walk, cta)


@pytest.mark.parametrize("num_sms", SMS)
def test_whole_waves_come_first_and_leave_no_sm_idle(num_sms: int) -> None:
    for made in walked(num_sms):
        walk, size = made.walk, made.walk.rows_per_cta
        assert size == rows_per_cta(walk.rows)
        assert walk.full_ctas == num_sms * (walk.rows // (size * num_sms)), walk
        assert made.sizes[: walk.full_ctas] == [size] * walk.full_ctas, walk
        waves = ceil_div(walk.rows, size * num_sms)
        assert ceil_div(walk.grid, num_sms) == waves, (walk, "more waves than the rows need")


@pytest.mark.parametrize("num_sms", SMS)
def test_the_tail_is_one_balanced_wave(num_sms: int) -> None:
    for made in walked(num_sms):
        walk, tail = made.walk, made.sizes[made.walk.full_ctas :]
        rest = walk.rows - walk.full_ctas * walk.rows_per_cta
        assert sum(tail) == rest
        assert len(tail) <= num_sms, (walk, "more than one wave")
        assert 1 <= walk.tail_rows <= walk.rows_per_cta, walk
        assert tail[:-1] == [walk.tail_rows] * len(tail[:-1]), walk
        assert all(1 <= size <= walk.tail_rows for size in tail[-1:]), walk
        # No shorter share would do: it is at its floor, or one row less overflows the wave.
        assert walk.tail_rows == SHORTEST or (walk.tail_rows - 1) * num_sms < rest, walk


@pytest.mark.parametrize("num_sms", SMS)
def test_no_sm_does_more_than_its_share(num_sms: int) -> None:
    """CTAs dealt round the SMs: the busiest has the rounded-up mean, or the floor's surplus."""
    for made in walked(num_sms):
        walk, sizes = made.walk, made.sizes
        assert sizes == sorted(sizes, reverse=True), (walk, "so SM 0 is the busiest")
        rest = walk.rows - walk.full_ctas * walk.rows_per_cta
        surplus = SHORTEST - 1 if 0 < rest <= SHORTEST * num_sms else 0
        assert sum(sizes[::num_sms]) <= ceil_div(walk.rows, num_sms) + surplus, walk


@pytest.mark.parametrize("num_sms", SMS)
@pytest.mark.parametrize("size", [4, 64])
def test_a_partial_interval_is_no_part_of_a_full_wave(num_sms: int, size: int) -> None:
    """One row short of a wave: the last interval is partial, so there is one full wave less."""
    for waves in range(1, 6):
        rows = waves * size * num_sms - 1
        if rows_per_cta(rows) != size:
            continue
        walk = cta_walk(rows, num_sms)
        assert walk.full_ctas == (waves - 1) * num_sms
        assert walk.interval(walk.grid - 1).stop == rows


@pytest.mark.parametrize(
    ("rows", "num_sms", "walk"),
    [
        (0, 148, CtaWalk(0, 4, 0, 3, 0)),
        (1, 148, CtaWalk(1, 4, 0, 3, 1)),
        (100, 148, CtaWalk(100, 4, 0, 3, 34)),
        (591, 148, CtaWalk(591, 4, 0, 4, 148)),
        (592, 148, CtaWalk(592, 4, 148, 3, 148)),
        (2400, 148, CtaWalk(2400, 4, 592, 3, 603)),
        (2401, 148, CtaWalk(2401, 64, 0, 17, 142)),
        (9472, 148, CtaWalk(9472, 64, 148, 3, 148)),
        (9473, 148, CtaWalk(9473, 64, 148, 3, 149)),
        (10000, 132, CtaWalk(10000, 64, 132, 12, 262)),
    ],
)
def test_walks_worked_out_by_hand(rows: int, num_sms: int, walk: CtaWalk) -> None:
    assert cta_walk(rows, num_sms) == walk


def test_few_rows_take_short_intervals_and_many_take_long_ones() -> None:
    assert [rows_per_cta(rows) for rows in (0, 1, 2400, 2401, 10**6)] == [4, 4, 4, 64, 64]


@pytest.mark.parametrize("num_sms", SMS)
def test_the_launch_bound_covers_every_row_count(num_sms: int) -> None:
    """Every row count up to 200000; the bound is the largest grid, not just above it."""
    worst = 0
    for rows in range(200_001):
        grid = cta_walk(rows, num_sms).grid
        if grid > worst or rows <= 20_000 or rows == 200_000:
            worst = max(worst, grid)
            assert grid_launch_bound(rows, num_sms) == worst, rows


@pytest.mark.parametrize(("rows", "num_sms"), [(-1, 8), (8, 0), (8, -1)])
def test_sizes_out_of_range_are_refused(rows: int, num_sms: int) -> None:
    name = "num_sms" if rows >= 0 else "rows"
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        cta_walk(rows, num_sms)
    name = "num_sms" if rows >= 0 else "capacity"
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        grid_launch_bound(rows, num_sms)


def test_a_negative_cta_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^cta: expected 0 or more, got -1"):
        cta_walk(100, 8).interval(-1)
