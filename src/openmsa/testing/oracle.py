"""The truth about one attention problem: exact, eager, and the rounding term.

Exact and eager are the dense definition (:mod:`openmsa.reference.dense`) entry by entry, gradients
by autograd; the rounding term is a first-order error analysis in float64, with every product taken
in absolute value. Notation, per query i, key j and head::

    u    unit roundoff of the accumulation dtype (fp32; fp64 for fp64)
    w    unit roundoff of the input dtype; what the contract rounds to it: P for P V and dv, dS for
         dq and dk, out where it enters delta. Each is an independent error, so these add in squares
    s    scale * q k      S = scale * |q| |k|      p = exp(s - lse)      B = |d_out| |v|
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract import Documents
from openmsa.contract.problem import accumulate_dtype
from openmsa.reference.dense import dense_attention, dense_mask
from openmsa.testing.case import Inputs
from openmsa.testing.compare import Report, compare, unit_roundoff

__all__ = ["AttentionTruth", "Truth", "attention_truth", "entry_slices"]

_QUANTITIES = ("out", "lse", "dq", "dk", "dv")

_ROWS = 256
"""Queries of one piece of the float64 work, whose keys end at its last visible one."""


@dataclass(frozen=True, eq=False)
class Truth:
    """One quantity: float64 ``exact``, ``eager`` (or None) and ``rounding``, judged by ``groups``.

    All three have the shape of the quantity without slack rows.
    """

    name: str
    exact: Tensor
    eager: Tensor | None
    rounding: Tensor
    groups: tuple[slice, ...]

    def compare(self, actual: Tensor) -> Report:
        """Hold ``actual`` (slack rows allowed, and not judged) to the yardstick."""
        rows = actual[: self.exact.shape[0]]
        return compare(self.name, rows, self.eager, self.exact, self.rounding, self.groups)


@dataclass(frozen=True, eq=False)
class AttentionTruth:
    """out, lse, dq, dk and dv of one problem.

    Attributes:
        quantities: name to truth.
        seen: bool ``[Hkv, Tq, Tk]``, may the query read the key?
    """

    quantities: dict[str, Truth]
    seen: Tensor

    def must_be_zero(self) -> dict[str, Tensor]:
        """Per quantity a bool mask ``[rows, heads]`` of what must be exactly zero."""
        group = self.quantities["out"].exact.shape[1] // self.seen.shape[0]
        blind = (~self.seen.any(2)).repeat_interleave(group, 0).t()
        unread = (~self.seen.any(1)).t()
        return {"out": blind, "dq": blind, "dk": unread, "dv": unread}


def attention_truth(
    inputs: Inputs,
    indices: Tensor,
    docs: Documents,
    block_size: int,
    *,
    scale: float | None = None,
    with_d_lse: bool = True,
) -> AttentionTruth:
    """The truth about attention over canonical ``indices`` and, with it, about its gradients.

    Args:
        inputs: operands in the dtype under test.
        indices: int32 ``[Hkv, Tq, topk]``.
        docs: the documents.
        block_size: keys per block.
        scale: softmax scale, ``D ** -0.5`` by default.
        with_d_lse: does the gradient of lse flow in, too?
    """
    factor = inputs.q.shape[2] ** -0.5 if scale is None else scale
    tq, tk = docs.num_queries, docs.num_keys
    dtype = inputs.q.dtype
    seen = dense_mask(indices[:, :tq], docs.layout, tk, block_size)
    entries = entry_slices(docs)
    pieces = [piece for entry in entries for piece in _pieces(*entry)]
    leaves = (inputs.q[:tq], inputs.k[:tk], inputs.v[:tk])
    grads = (inputs.d_out[:tq], inputs.d_lse[:tq] if with_d_lse else None)
    exact = _dense(leaves, grads, seen, pieces, factor, torch.float64)
    eager = exact if dtype == torch.float64 else _dense(leaves, grads, seen, entries, factor, dtype)
    slips = _Slips(leaves, grads, seen, factor, dtype)
    for rows, keys in pieces:
        slips.add(rows, keys)
    by_query = tuple(rows for rows, _ in entries)
    by_key = tuple(slice(start, start + n) for start, n in docs.layout.ranges.tolist())
    quantities = {}
    for name, value, plain in zip(_QUANTITIES, exact, eager, strict=True):
        groups = by_key if name in ("dk", "dv") else by_query
        bound = slips.bound(name, value)
        quantities[name] = Truth(name, value, None if name == "lse" else plain, bound, groups)
    return AttentionTruth(quantities, seen)


def entry_slices(docs: Documents) -> list[tuple[slice, slice]]:
    """Packed query rows and key rows of each entry."""
    offsets = docs.layout.cu_seqlens_q.tolist()
    return [
        (slice(offsets[entry], offsets[entry + 1]), slice(start, start + length))
        for entry, (start, length, _) in enumerate(docs.layout.spans.tolist())
    ]


def _pieces(rows: slice, keys: slice) -> Iterator[tuple[slice, slice]]:
    """An entry cut into runs of queries, each with the keys up to its last query's position."""
    for first in range(rows.start, rows.stop, _ROWS):
        last = min(first + _ROWS, rows.stop)
        yield slice(first, last), slice(keys.start, max(keys.start, keys.stop + last - rows.stop))


def _dense(
    leaves: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    seen: Tensor,
    pieces: list[tuple[slice, slice]],
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of the dense definition in ``dtype``."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in leaves)
    acc = accumulate_dtype(dtype)
    outs = [q.new_zeros((0, *q.shape[1:]))]
    lses = [q.new_zeros((0, q.shape[1]), dtype=acc)]
    for rows, keys in pieces:
        out, lse = dense_attention(q[rows], k[keys], v[keys], seen[:, rows, keys], scale)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    d_out = grads[0].to(dtype)
    d_lse = torch.zeros_like(lse) if grads[1] is None else grads[1].to(acc)
    if not out.requires_grad:
        return out, lse, *(torch.zeros_like(x) for x in (q, k, v))
    found = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse), allow_unused=True)
    dq, dk, dv = (
        torch.zeros_like(x) if g is None else g for g, x in zip(found, (q, k, v), strict=True)
    )
    return out.detach(), lse.detach(), dq, dk, dv


class _Slips:
    """What rounding may do to out, lse, dq, dk and dv, summed over pieces of queries.

    ``linear`` holds bounds that add up, ``squares`` the squares of independent roundings.
    """

    def __init__(
        self,
        leaves: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        seen: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        self.q, self.k, self.v = (x.double() for x in leaves)
        self.d_out = grads[0].double()
        self.d_lse = self.d_out.new_zeros(self.d_out.shape[:2])
        if grads[1] is not None:
            self.d_lse = grads[1].double()
        self.seen, self.scale, self.group = seen, scale, self.q.shape[1] // self.k.shape[1]
        self.u, self.w = unit_roundoff(accumulate_dtype(dtype)), unit_roundoff(dtype)
        # Below the smallest normal number a rounding is absolute, not relative.
        self.tiny = torch.finfo(dtype).smallest_normal * self.w
        self.readers = (seen.sum(1) * self.group).sqrt()[:, None, :, None]
        shapes = zip(_QUANTITIES, (self.q, self.d_lse, self.q, self.k, self.v), strict=True)
        self.linear = {name: torch.zeros_like(x) for name, x in shapes}
        self.squares = {name: torch.zeros_like(x) for name, x in self.linear.items()}

    def bound(self, name: str, exact: Tensor) -> Tensor:
        """The rounding term of one quantity, its own storing included."""
        bound = self.linear[name] + self.squares[name].sqrt()
        if name == "lse":
            return bound + self.u * torch.where(exact.isfinite(), exact.abs(), 0.0)
        return bound + self.w * exact.abs() + self.tiny

    def add(self, rows: slice, keys: slice) -> None:
        """Add one piece. Tensors are ``[Hkv, group, n, m]``, or ``D`` in place of n or m."""
        if rows.start == rows.stop or keys.start == keys.stop:
            return
        q, d_out = (self._by_head(x[rows]) for x in (self.q, self.d_out))
        d_lse = self._by_head(self.d_lse[rows, :, None])
        k, v = (x[keys].transpose(0, 1)[:, None] for x in (self.k, self.v))
        seen = self.seen[:, None, rows, keys]
        u, w, root = self.u, self.w, math.sqrt(q.shape[-1])
        count = seen.sum(-1, keepdim=True).sqrt()
        readers = self.readers[:, :, keys]

        s = (self.scale * q @ k.mT).masked_fill(~seen, 0.0)
        lse = s.masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)
        lse = torch.where(seen.any(-1, keepdim=True), lse, 0.0)
        p = torch.where(seen, (s - lse).exp(), 0.0)
        # A logit: its dot product and two foldings of the scale; then s - lse and exp itself.
        size = self.scale * q.abs() @ k.abs().mT
        e_s = u * ((root + 2) * size + 2 * (s.abs() + lse.abs() + 1))
        e_lse = (p * e_s).sum(-1, keepdim=True) + u * (count + 1)
        e_p = p * (e_s + e_lse + u * lse.abs())

        out, dp, b = p @ v, d_out @ v.mT, d_out.abs() @ v.abs().mT
        delta = (p * dp).sum(-1, keepdim=True) - d_lse
        # delta through P, through its own sums, and through the rounded P and out.
        e_delta = (e_p * dp.abs() + u * (count + root) * p * b).sum(-1, keepdim=True)
        e_delta += u * (delta.abs() + d_lse.abs())
        w_delta = w * (
            (p * dp).norm(dim=-1, keepdim=True) + (out * d_out).norm(dim=-1, keepdim=True)
        )
        ds = p * (dp - delta)
        e_ds = e_p * (dp - delta).abs()
        e_ds += p * (u * (root * b + dp.abs() + delta.abs()) + e_delta)

        self._by_query("out", rows, (e_p + u * count * p) @ v.abs(), self._rss(p, seen, v))
        self._by_query("lse", rows, e_lse, torch.zeros_like(e_lse))
        linear = (e_ds + u * count * ds.abs()) @ k.abs()
        squares = (w_delta * (p @ k)).square() + self._rss(ds, seen, k)
        self._by_query("dq", rows, self.scale * linear, self.scale**2 * squares)
        linear = e_ds.mT @ q.abs() + u * readers * (ds.abs().mT @ q.abs())
        squares = (p * w_delta).square().mT @ q.square() + self._rss(ds.mT, seen.mT, q)
        self._by_key("dk", keys, self.scale * linear, self.scale**2 * squares)
        linear = e_p.mT @ d_out.abs() + u * readers * (p.mT @ d_out.abs())
        self._by_key("dv", keys, linear, self._rss(p.mT, seen.mT, d_out))

    def _rss(self, weights: Tensor, seen: Tensor, x: Tensor) -> Tensor:
        """Squares of what rounding ``weights`` to the input dtype does to ``weights @ x``."""
        squares: Tensor = (self.w * weights).square() @ x.square()
        return squares + (self.tiny * seen.double()).square() @ x.square()

    def _by_head(self, x: Tensor) -> Tensor:
        """``[n, Hq, C] -> [Hkv, group, n, C]``."""
        return torch.unflatten(x.transpose(0, 1), 0, (-1, self.group))

    def _by_query(self, name: str, rows: slice, linear: Tensor, squares: Tensor) -> None:
        for into, part in ((self.linear[name], linear), (self.squares[name], squares)):
            into[rows] = part.flatten(0, 1).transpose(0, 1).reshape(into[rows].shape)

    def _by_key(self, name: str, keys: slice, linear: Tensor, squares: Tensor) -> None:
        for into, part in ((self.linear[name], linear), (self.squares[name], squares)):
            into[keys] += part.sum(1).transpose(0, 1)
