"""The yardstick: how far a result may be from the truth, with no hand-tuned tolerance.

Three values of the same quantity are compared: ``exact``, computed in float64; ``eager``, what
plain PyTorch gives in the dtype under test; ``actual``, ours. The rule, elementwise in float64::

    error(actual) <= 2 * error(eager) + rounding

in the maximum norm (``max``) and in the 2-norm relative to the exact result (``l2``), for each
document on its own, so that one document's large values cannot hide another's error.

``rounding`` is what a correct algorithm may lose even where the eager one happens to lose nothing.
With ``u`` the unit roundoff (half the spacing at 1) of a dtype and n the length of the reduction::

    rounding = u(output) * |exact| + sqrt(n) * u(accumulation) * sum |terms|

The first part is the one rounding of the stored result: at most half a unit in the last place. The
second is the sum itself: n roundings of partial sums, each at most ``u`` times the largest partial
sum, which ``sum |terms|`` bounds; they are independent, so they add up like ``sqrt(n)`` (Higham and
Mary, SIAM J. Sci. Comput. 41, 2019) rather than ``n``. :mod:`openmsa.testing.oracle` applies this
to attention's chained sums and adds the roundings that the contract itself prescribes.

A log-sum-exp has no eager slack: it is held to the rounding of the accumulation dtype alone.
Infinities and NaN must agree in position and sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Report",
    "assert_exact",
    "assert_ok",
    "assert_within",
    "compare",
    "compare_exact",
    "compare_selection",
    "rounding",
    "unit_roundoff",
]


@dataclass(frozen=True)
class Report:
    """One comparison.

    Attributes:
        name: the quantity, for example ``"dq"``.
        error: the actual error in ``norm``, of the document that uses most of its bound.
        eager_error: what plain PyTorch's error is there.
        bound: what the error may be.
        status: ``"ok"``, ``"failed"`` or ``"skipped"``.
        norm: ``"max"``, ``"l2"``, ``"exact"`` (error counts differing elements) or ``"score"``.
        detail: the worst element, or why it was skipped.
        problem: the problem's name, where there is one.
        dtype: the dtype's name, where there is one.
    """

    name: str
    error: float = 0.0
    eager_error: float = 0.0
    bound: float = 0.0
    status: str = "ok"
    norm: str = ""
    detail: str = ""
    problem: str = ""
    dtype: str = ""

    @property
    def ok(self) -> bool:
        """Did the comparison run, and within its bound?"""
        return self.status == "ok"

    def __str__(self) -> str:
        where = " ".join(part for part in (self.problem, self.dtype, self.name) if part)
        if self.status == "skipped":
            return f"{where}: skipped, {self.detail}"
        numbers = (
            f"{self.norm} error {self.error:.3e}, bound {self.bound:.3e} "
            f"(eager error {self.eager_error:.3e})"
        )
        return f"{where}: {self.status}, {numbers}" + (f"; {self.detail}" if self.detail else "")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest, half the spacing at 1: bf16 2^-8, fp16
    2^-11, fp32 2^-24, fp64 2^-53."""
    return torch.finfo(dtype).eps / 2


def rounding(
    exact: Tensor,
    terms: Tensor,
    reduction: int,
    dtype: torch.dtype,
    accumulate: torch.dtype = torch.float32,
) -> Tensor:
    """The rounding term of a plain sum.

    Args:
        exact: float64 result.
        terms: float64 ``sum |terms|``, broadcastable to ``exact``.
        reduction: number of terms.
        dtype: dtype of the stored result.
        accumulate: dtype of the sum.
    """
    u = unit_roundoff(dtype)
    stored = u * exact.abs() + torch.finfo(dtype).smallest_normal * u
    return stored + math.sqrt(reduction) * unit_roundoff(accumulate) * terms


def compare(
    name: str,
    actual: Tensor,
    eager: Tensor | None,
    exact: Tensor,
    rounding: Tensor,
    groups: Sequence[slice] | None = None,
) -> Report:
    """Hold ``actual`` to the yardstick.

    Args:
        name: the quantity, for messages.
        actual: the result under test, any float dtype.
        eager: the same in plain PyTorch; None grants no eager error. Where it overflowed it grants
            none either.
        exact: float64 truth of the same shape.
        rounding: float64 rounding term of the same shape.
        groups: slices of the first axis judged on their own (documents); by default one group.

    Returns:
        The report of the norm and group that use most of their bound. ``detail`` names the element
        that is furthest beyond what its own exact value and rounding term allow.
    """
    if actual.shape != exact.shape:
        detail = f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
        return Report(name, math.inf, 0.0, 0.0, "failed", "exact", detail)
    values = actual.detach().double()
    # What the exact result is once stored: fp16 may overflow where float64 does not.
    stored = exact.to(actual.dtype).double()
    finite = stored.isfinite()
    same = torch.where(
        finite, values.isfinite(), (values == stored) | (values.isnan() & stored.isnan())
    )
    if not bool(same.all()):
        wrong = (~same).nonzero()
        detail = f"{_element(wrong[0], values, exact)} and {len(wrong) - 1} more non-finite"
        return Report(name, math.inf, 0.0, 0.0, "failed", "max", detail)
    error = torch.where(finite, (values - exact).abs(), 0.0)
    slack = torch.zeros_like(error)
    if eager is not None:
        slack = (eager.detach().double() - exact).abs()
        slack = torch.where(finite & slack.isfinite(), slack, 0.0)
    allowed = torch.where(finite, rounding, 0.0)
    size = torch.where(finite, exact, 0.0)
    worst, worst_ratio = Report(name, norm="max"), -1.0
    for group in groups if groups is not None else (slice(None),):
        for norm in ("max", "l2"):
            e, s, r = (_norm(x[group], size[group], norm) for x in (error, slack, allowed))
            bound = 2 * s + r
            ratio = e / bound if bound > 0 else (math.inf if e > 0 else 0.0)
            if ratio > worst_ratio:
                status = "ok" if e <= bound else "failed"
                worst, worst_ratio = Report(name, e, s, bound, status, norm), ratio
    if worst.status == "failed":
        excess = (error - allowed).flatten().argmax()
        at = torch.stack(torch.unravel_index(excess, error.shape))
        worst = Report(*_fields(worst), detail=_element(at, values, exact))
    return worst


def compare_exact(name: str, actual: Tensor, expected: Tensor) -> Report:
    """Bitwise equality of shape, dtype and elements; the report counts the differing elements."""
    for what, got, wanted in (
        ("shape", tuple(actual.shape), tuple(expected.shape)),
        ("dtype", actual.dtype, expected.dtype),
    ):
        if got != wanted:
            detail = f"{what} {got}, expected {wanted}"
            return Report(name, math.inf, 0.0, 0.0, "failed", "exact", detail)
    differs = (_bits(actual.detach()) != _bits(expected.detach())).nonzero()
    if not len(differs):
        return Report(name, norm="exact")
    detail = f"first at {_element(differs[0], actual, expected)}"
    return Report(name, float(len(differs)), 0.0, 0.0, "failed", "exact", detail)


def compare_selection(
    name: str, actual: Tensor, expected: Tensor, scores: Tensor, tolerance: Tensor
) -> Report:
    """Equality of two canonical selections, except where scores tie within rounding.

    Each row is compared as a set. A block that is chosen in place of an expected one is forgiven
    where their exact scores differ by no more than the rounding of both; a row in another form
    (unsorted, repeated ids, -1 inside, another number of blocks) never is.

    Args:
        name: the quantity, for messages.
        actual: int32 ``[H, Tq, topk]``.
        expected: the same from the float64 oracle.
        scores: float64 ``[H, Tq, blocks]``, +inf for forced blocks, -inf for blocks out of sight.
        tolerance: float64 of the same shape, what rounding may do to each score; 0 demands
            equality.
    """
    plain = compare_exact(name, actual, expected)
    if plain.ok or plain.error == math.inf:
        return plain
    worst = Report(name, norm="score")
    for head, row in (actual != expected).any(-1).nonzero().tolist():
        got, wanted = actual[head, row].tolist(), expected[head, row].tolist()
        extra, missing = sorted(set(got) - set(wanted)), sorted(set(wanted) - set(got))
        where = f"kv head {head}, query {row}: got {got}, expected {wanted}"
        chosen = [block for block in got if block >= 0]
        canonical = chosen == sorted(set(chosen)) and got[len(chosen) :] == [-1] * (
            len(got) - len(chosen)
        )
        in_range = all(block < scores.shape[2] for block in chosen)
        if not canonical or not in_range or len(extra) != len(missing) or -1 in extra + missing:
            return Report(name, math.inf, 0.0, 0.0, "failed", "score", where)
        rank, slack = scores[head, row], tolerance[head, row]
        gap = float(rank[missing].max() - rank[extra].min())
        bound = float(slack[missing].max() + slack[extra].max())
        if not (gap <= bound and bound > 0):
            return Report(name, gap, 0.0, bound, "failed", "score", where)
        if gap >= worst.error:
            worst = Report(name, gap, 0.0, bound, "ok", "score", where)
    return worst


def assert_ok(report: Report) -> None:
    """Raise AssertionError with the report's text unless it is ok."""
    if not report.ok:
        raise AssertionError(str(report))


def assert_within(
    name: str,
    actual: Tensor,
    eager: Tensor | None,
    exact: Tensor,
    rounding: Tensor,
    groups: Sequence[slice] | None = None,
) -> None:
    """:func:`compare`, raising AssertionError that names the worst element."""
    assert_ok(compare(name, actual, eager, exact, rounding, groups))


def assert_exact(name: str, actual: Tensor, expected: Tensor) -> None:
    """:func:`compare_exact`, raising AssertionError that names the first differing element."""
    assert_ok(compare_exact(name, actual, expected))


def _norm(x: Tensor, exact: Tensor, norm: str) -> float:
    if not x.numel():
        return 0.0
    if norm == "max":
        return float(x.max())
    size = float(exact.norm())
    return float(x.norm()) / (size if size > 0 else 1.0)


def _fields(report: Report) -> tuple[str, float, float, float, str, str]:
    return (
        report.name,
        report.error,
        report.eager_error,
        report.bound,
        report.status,
        report.norm,
    )


def _bits(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(widths[x.itemsize])


def _element(at: Iterable[Tensor], actual: Tensor, expected: Tensor) -> str:
    index = tuple(int(i) for i in at)
    return f"element {list(index)}: got {actual[index].item()}, expected {expected[index].item()}"
