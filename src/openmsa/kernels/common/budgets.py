"""What a thread block may take of an SM, checked before anything is compiled. No DSL here.

A role that asks for registers that no other gave back waits for ever, as does one that allocates
tensor memory beyond its columns, or waits at a barrier for more arrivals than there are; shared
memory beyond the limit fails at launch. Here each is an error that names the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["check_arrivals", "check_columns", "check_registers", "check_shared"]

REGISTERS = 65_536
SHARED_BYTES = 232_448
TENSOR_COLUMNS = 512
_WARPGROUP = 4  # warps that change their registers together
_MOST = 255
_STEP = 8


def check_registers(roles: Mapping[str, tuple[int, int]]) -> None:
    """``roles`` are a thread block's, all of it: (warps, registers of a thread) by name.

    Raises:
        ValueError: a role is no whole number of warpgroups, a count is no multiple of 8 up to 255,
            or more are given out than the file holds, or than the launch gave in equal shares.
    """
    threads = sum(warps for warps, _ in roles.values()) * 32
    taken = 0
    for name, (warps, registers) in roles.items():
        if warps % _WARPGROUP:
            raise ValueError(f"role {name!r}: {warps} warps are no whole number of warpgroups")
        if registers % _STEP or not _STEP <= registers <= _MOST:
            raise ValueError(
                f"role {name!r}: {registers} registers, not a multiple of 8 up to {_MOST}"
            )
        taken += warps * 32 * registers
    share = min(REGISTERS // threads // _STEP * _STEP, _MOST // _STEP * _STEP)
    if taken > share * threads:
        raise ValueError(
            f"roles take {taken} registers of the {share * threads} that {threads} threads start "
            "with: the last to ask would wait for ever"
        )


def check_shared(taken: int) -> None:
    """Raise ValueError if ``taken`` bytes are more than a thread block can have."""
    if taken > SHARED_BYTES:
        raise ValueError(f"{taken} bytes of shared memory, at most {SHARED_BYTES}")


def check_columns(regions: Mapping[str, tuple[int, int]], allocated: int) -> None:
    """``regions`` are (first column, columns) by name, in use at the same time.

    Raises:
        ValueError: ``allocated`` is no power of two from 32 to 512, a region lies outside of it, or
            two overlap.
    """
    if allocated not in (32, 64, 128, 256, TENSOR_COLUMNS):
        raise ValueError(f"{allocated} tensor memory columns: a power of two from 32 to 512")
    end, before = 0, "the start"
    for name, (first, columns) in sorted(regions.items(), key=lambda item: item[1]):
        if first < end:
            raise ValueError(f"columns of {name!r} begin at {first}, within those of {before!r}")
        end, before = first + columns, name
        if end > allocated:
            raise ValueError(f"columns of {name!r} end at {end}, of {allocated} allocated")


def check_arrivals(expected: Mapping[str, int], arriving: Mapping[str, int]) -> None:
    """Barriers by name: the arrivals that complete a phase, and those that the roles make in one.

    Raises:
        ValueError: a barrier waits for more than come (a hang) or fewer (a race).
    """
    for name, count in expected.items():
        come = arriving.get(name)
        if come is None:
            raise ValueError(f"nobody arrives at barrier {name!r}, which waits for {count}")
        if come != count:
            what = "a hang" if come < count else "a race"
            raise ValueError(f"barrier {name!r} waits for {count} arrivals, {come} come: {what}")
