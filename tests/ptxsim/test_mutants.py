"""Mutants of a correct tcgen05 kernel: each must stop with an error that names what was broken."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import ptxsim

sys.path.insert(0, str(Path(__file__).parent))

from kernels import tcgen05_gemm as gemm

Change = str | Callable[[str], str] | None


@dataclass(frozen=True)
class Mutant:
    """One broken line: its tag, the change (None drops it), and the error that must come."""

    name: str
    tag: str
    change: Change
    error: type[ptxsim.SimulationError]
    message: str
    strict: bool = False  # do shipping kernels break the same rule?
    races: bool = False  # is race detection needed to find it under every schedule?

    def __str__(self) -> str:
        return self.name


def swap(old: str, new: str) -> Callable[[str], str]:
    """A change of one line; the old text must stand in it."""

    def change(line: str) -> str:
        assert old in line, line
        return line.replace(old, new)

    return change


def then(more: str) -> Callable[[str], str]:
    """The line, and another one behind it."""
    return lambda line: f"{line}\n{more}"


def matrix(bits: int) -> Callable[[str], str]:
    """Flip bits of a matrix descriptor."""
    return swap(f"{gemm.MATRIX:#x}", f"{gemm.MATRIX ^ bits:#x}")


TWICE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tensor, 64;"
WIDE_FORM = f"mov.u32 %form, {(gemm.FORM & ~(63 << 17)) | 16 << 17:#x};"
MUTANTS = [
    # Fences.
    Mutant("no-proxy-fence", "fence", None, ptxsim.MissingFence,
           r"warp \d wrote without a later fence.proxy.async"),
    Mutant("no-wait-st", "wait-st", None, ptxsim.AsyncHazard,
           r"warp \d wrote by tcgen05.st without tcgen05.wait::st"),
    # Waits.
    Mutant("no-full-wait", "wait-full", None, ptxsim.AsyncHazard,
           "reads shared bytes that an unfinished operation writes"),
    Mutant("no-empty-wait", "wait-empty", None, ptxsim.BarrierError,
           "1 arrivals, but phase 0 expects only 0 more of 1"),
    Mutant("no-accumulated-wait", "wait-accumulated", None, ptxsim.AsyncHazard,
           "tcgen05 operations on them are unfinished"),
    Mutant("no-setup-barrier", "sync-setup", None, ptxsim.UninitialisedRead, "never written"),
    Mutant("no-final-barrier", "sync-finish", None, ptxsim.AsyncHazard,
           "dealloc .* while tcgen05 operations on them are unfinished"),
    Mutant("no-store-wait", "wait-store", None, ptxsim.AsyncHazard,
           "ends without cp.async.bulk.wait_group for cp.async.bulk.tensor", strict=True),
    Mutant("no-store-commit", "commit-store", None, ptxsim.AsyncHazard,
           "ends without cp.async.bulk.wait_group for cp.async.bulk.tensor", strict=True),
    # Arrivals.
    Mutant("no-commit-of-stage", "commit-empty", None, ptxsim.Deadlock,
           r"waits for parity 0 of mbarrier 0x1041\d in phase 0: 1 of 1 arrivals"),
    Mutant("no-commit-of-result", "commit-accumulated", None, ptxsim.Deadlock,
           "waits for parity 0 of mbarrier 0x10420 in phase 0: 1 of 1 arrivals"),
    Mutant("no-arrive-but-expect", "expect", lambda line: line.replace(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _,",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
    ), ptxsim.Deadlock, r"mbarrier 0x1040\d in phase 0: 1 of 1 arrivals"),
    Mutant("no-named-arrive", "arrive-initialised", None, ptxsim.Deadlock,
           r"barrier 1: 32 of 160 threads, warps \[5\]"),
    Mutant("load-dropped", "load-b", None, ptxsim.Deadlock,
           r"0 of 1 arrivals and 8192 of 24576 bytes are missing"),
    # Parities and counts.
    Mutant("wrong-parity-of-consumer", "parity-full", "xor.b32 %phase, %phase, 1;",
           ptxsim.AsyncHazard, "an unfinished operation writes"),
    Mutant("wrong-parity-of-producer", "parity-empty", None, ptxsim.Deadlock,
           r"waits for parity 0 of mbarrier 0x10410"),
    Mutant("short-transaction-count", "expect", swap("24576", "16384"), ptxsim.AsyncHazard,
           "an unfinished operation writes"),
    Mutant("very-short-transaction-count", "expect", swap("24576", "8192"), ptxsim.BarrierError,
           "got 8192 bytes more than the 8192 announced"),
    Mutant("long-transaction-count", "expect", swap("24576", "32768"), ptxsim.Deadlock,
           "0 of 1 arrivals and 8192 of 32768 bytes are missing"),
    Mutant("no-transaction-count", "expect", "mbarrier.arrive.shared::cta.b64 _, [%full];",
           ptxsim.AsyncHazard, "an unfinished operation writes"),
    Mutant("barrier-count-too-large", "init-empty", swap("1;", "2;"), ptxsim.Deadlock,
           r"1 of 2 arrivals"),
    Mutant("barrier-count-zero", "init-accumulated", swap("1;", "0;"), ptxsim.BarrierError,
           "init with count 0"),
    Mutant("barrier-not-initialised", "init-full", None, ptxsim.BarrierError,
           "no mbarrier was initialised at shared address 0x10400"),
    Mutant("named-barrier-count-too-large", "sync-staged", "bar.sync 2, 160;", ptxsim.Deadlock,
           "barrier 2: 128 of 160 threads"),
    Mutant("named-barrier-count-odd", "sync-staged", "bar.sync 2, 100;", ptxsim.BarrierError,
           "100 threads is no multiple of 32"),
    # Descriptors and addresses.
    Mutant("descriptor-leaves-its-span", "matrix-db", then("add.s64 %db, %db, 1;"),
           ptxsim.InvalidOperand, "32 bytes of K leave the 128-byte span"),
    Mutant("descriptor-out-of-shared-memory", "matrix-da", then("add.s64 %da, %da, 0x1400;"),
           ptxsim.OutOfBounds, "the CTA has 1024..66623"),
    Mutant("descriptor-of-the-other-stage", "matrix-db", then("add.s64 %db, %db, 512;"),
           ptxsim.AsyncHazard, "an unfinished operation writes"),
    Mutant("wrong-swizzle-64", "matrix-da", matrix(6 << 61), ptxsim.InvalidOperand,
           "reads with a 64-byte swizzle what a copy wrote with 128"),
    Mutant("wrong-swizzle-none", "matrix-db", matrix(2 << 61), ptxsim.InvalidOperand,
           "reads with a 0-byte swizzle what a copy wrote with 128"),
    Mutant("descriptor-of-another-chip", "matrix-db", matrix(1 << 46), ptxsim.InvalidOperand,
           "bit 46 must be 1 for tcgen05"),
    Mutant("copy-misaligned", "load-a", swap("[%at]", "[%at+64]"), ptxsim.Misaligned,
           "multiple of 128"),
    Mutant("copy-out-of-shared-memory", "load-b", swap("[%at]", "[%at+98304]"),
           ptxsim.OutOfBounds, "the CTA has 1024..66623"),
    Mutant("store-misaligned", "stage-0", swap("[%at]", "[%at+4]"), ptxsim.Misaligned,
           "shared access of 16 bytes"),
    Mutant("store-dropped", "stage-3", None, ptxsim.UninitialisedRead,
           "reads shared bytes never written"),
    # Tensor memory.
    Mutant("never-freed", "dealloc", None, ptxsim.TensorMemoryError,
           r"still allocated: 0\+64 columns"),
    Mutant("freed-twice", "dealloc", then(TWICE), ptxsim.TensorMemoryError,
           "the allocations are none"),
    Mutant("freed-in-part", "dealloc", swap("64;", "32;"), ptxsim.TensorMemoryError,
           r"dealloc of 32 columns at 0x0, but the allocations are 0\+64"),
    Mutant("accumulator-not-initialised", "initialise", None, ptxsim.UninitialisedRead,
           r"tcgen05.mma \(D\) reads tensor memory never written"),
    Mutant("result-wider-than-allocation", "form", WIDE_FORM, ptxsim.TensorMemoryError,
           r"columns 0..127; allocated: 0\+64"),
    Mutant("read-past-allocation", "read", swap("[%mine]", "[%mine+16]"),
           ptxsim.TensorMemoryError, r"columns 16..79; allocated: 0\+64"),
    Mutant("lanes-of-another-warp", "lanes", "mov.u32 %mine, %tensor;",
           ptxsim.TensorMemoryError, r"warp 1 reaches lanes 32..63 only"),
    Mutant("columns-no-power-of-two", "alloc", swap("64;", "48;"), ptxsim.TensorMemoryError,
           "48 columns: a power of two"),
    # Order between warps: whether such a fault shows depends on the schedule, unless races are
    # looked for.
    Mutant(
        "no-barrier-before-the-store",
        "sync-staged",
        None,
        ptxsim.DataRace,
        r"cp.async.bulk.tensor reads what warp [123] has written in line \d+",
        races=True,
    ),
    Mutant(
        "no-barrier-before-the-product",
        "sync-initialised",
        None,
        ptxsim.DataRace,
        r"tcgen05.mma \(D\) writes what an operation of warp [0-3] has written in line \d+",
        races=True,
    ),
    Mutant(
        "no-barrier-before-the-release",
        "sync-finish",
        None,
        ptxsim.DataRace,
        "tcgen05.dealloc writes what .* warp 5 has written",
        races=True,
    ),
    # Who executes.
    Mutant("every-lane-multiplies", "elect-mma",
           "elect.sync %r0|%one, -1; setp.eq.u32 %one, %r0, %r0;", ptxsim.InvalidOperand,
           "tcgen05.mma must be executed by one thread"),
]  # fmt: skip


@cache
def problem() -> dict[str, np.ndarray]:
    return gemm.problem(rows=128, depth=320)


def error_of(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_is_correct_under_every_schedule(seed: int) -> None:
    data = gemm.problem(rows=256, depth=320)
    result = gemm.launch(gemm.text(), data, seed=seed)
    # One rounding to bfloat16 of a float32 sum: 2^-9 at most, less on average.
    assert error_of(result, data["expected"]) < 2**-9
    assert np.array_equal(result, gemm.launch(gemm.text(), data, seed=0))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant) -> None:
    broken = gemm.mutate(mutant.tag, mutant.change)
    with pytest.raises(mutant.error, match=mutant.message) as caught:
        gemm.launch(broken, problem(), races=mutant.races, strict=mutant.strict)
    assert type(caught.value) is mutant.error
    if not isinstance(caught.value, ptxsim.TensorMemoryError) or "ended" not in str(caught.value):
        assert caught.value.line is not None
        assert caught.value.text


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.races], ids=str)
def test_race_is_found_under_every_schedule(mutant: Mutant, seed: int) -> None:
    broken = gemm.mutate(mutant.tag, mutant.change)
    # Released before it is used: that schedule shows without clocks.
    with pytest.raises((mutant.error, ptxsim.TensorMemoryError)) as caught:
        gemm.launch(broken, problem(), seed=seed, races=True)
    if mutant.name != "no-barrier-before-the-release":
        assert re.search(mutant.message, str(caught.value))


@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_has_no_race_and_breaks_no_strict_rule(seed: int) -> None:
    result = gemm.launch(gemm.text(), problem(), seed=seed, races=True, strict=True)
    assert error_of(result, problem()["expected"]) < 2**-9


def test_there_are_twenty_mutants_of_each_kind_that_matters() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 20
