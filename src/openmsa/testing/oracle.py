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
    dtype, acc = inputs.q.dtype, accumulate_dtype(inputs.q.dtype)
    seen = dense_mask(indices[:, :tq], docs.layout, tk, block_size)
    entries = entry_slices(docs)
    leaves = (inputs.q[:tq], inputs.k[:tk], inputs.v[:tk])
    grads = (inputs.d_out[:tq], inputs.d_lse[:tq] if with_d_lse else None)
    exact = _dense(leaves, grads, seen, entries, factor, torch.float64)
    eager = exact if dtype == torch.float64 else _dense(leaves, grads, seen, entries, factor, dtype)
    bounds = _Bounds(leaves, grads, seen, factor, dtype, acc)
    for rows, keys in entries:
        bounds.add(rows, keys)
    by_query = tuple(rows for rows, _ in entries)
    by_key = tuple(slice(start, start + n) for start, n in docs.layout.ranges.tolist())
    quantities = {}
    for name, value, plain, bound in zip(_QUANTITIES, exact, eager, bounds.terms, strict=True):
        groups = by_key if name in ("dk", "dv") else by_query
        quantities[name] = Truth(name, value, None if name == "lse" else plain, bound, groups)
    return AttentionTruth(quantities, seen)


def entry_slices(docs: Documents) -> list[tuple[slice, slice]]:
    """Packed query rows and key rows of each entry."""
    offsets = docs.layout.cu_seqlens_q.tolist()
    return [
        (slice(offsets[entry], offsets[entry + 1]), slice(start, start + length))
        for entry, (start, length, _) in enumerate(docs.layout.spans.tolist())
    ]


def _dense(
    leaves: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    seen: Tensor,
    entries: list[tuple[slice, slice]],
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of the dense definition in ``dtype``."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in leaves)
    acc = accumulate_dtype(dtype)
    outs = [q.new_zeros((0, *q.shape[1:]))]
    lses = [q.new_zeros((0, q.shape[1]), dtype=acc)]
    for rows, keys in entries:
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


class _Bounds:
    """Rounding terms of out, lse, dq, dk and dv, summed over the entries."""

    def __init__(
        self,
        leaves: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        seen: Tensor,
        scale: float,
        dtype: torch.dtype,
        acc: torch.dtype,
    ) -> None:
        self.q, self.k, self.v = (x.double() for x in leaves)
        self.d_out = grads[0].double()
        self.d_lse = self.d_out.new_zeros(self.d_out.shape[:2])
        if grads[1] is not None:
            self.d_lse = grads[1].double()
        self.seen, self.scale, self.group = seen, scale, self.q.shape[1] // self.k.shape[1]
        self.u, self.w = unit_roundoff(acc), unit_roundoff(dtype)
        # Below the smallest normal number a rounding is absolute, not relative.
        self.tiny = torch.finfo(dtype).smallest_normal * self.w
        self.readers = (seen.sum(1) * self.group).sqrt()[:, None, :, None]
        out, lse, dq, dk, dv = (
            torch.zeros_like(x) for x in (self.q, self.d_lse, self.q, self.k, self.v)
        )
        self.terms = (out, lse, dq, dk, dv)

    def add(self, rows: slice, keys: slice) -> None:
        """Add one entry. Tensors are ``[Hkv, group, n, m]``, or ``D`` in place of n or m."""
        if rows.start == rows.stop or keys.start == keys.stop:
            return
        q, d_out = (self._by_head(x[rows]) for x in (self.q, self.d_out))
        d_lse = self._by_head(self.d_lse[rows, :, None])
        k, v = (x[keys].transpose(0, 1)[:, None] for x in (self.k, self.v))
        seen = self.seen[:, None, rows, keys]
        u, w, tiny, root = self.u, self.w, self.tiny, math.sqrt(q.shape[-1])
        count = seen.sum(-1, keepdim=True).sqrt()

        s = (self.scale * q @ k.mT).masked_fill(~seen, 0.0)
        lse = s.masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)
        lse = torch.where(seen.any(-1, keepdim=True), lse, 0.0)
        p = torch.where(seen, (s - lse).exp(), 0.0)
        size = self.scale * q.abs() @ k.abs().mT
        # A logit: its dot product and two foldings of the scale; then s - lse and exp itself.
        e_s = torch.where(seen, u * ((root + 2) * size + 2 * (s.abs() + lse.abs() + 1)), 0.0)
        e_lse = (p * e_s).sum(-1, keepdim=True) + u * (count + 1 + lse.abs())
        e_p = p * (e_s + e_lse)

        out = p @ v
        e_out = e_p @ v.abs() + u * count * (p @ v.abs())
        e_out += w * _rss(p, v) + tiny * _rss(seen.double(), v) + w * out.abs() + tiny

        dp, b = d_out @ v.mT, d_out.abs() @ v.abs().mT
        delta = (p * dp).sum(-1, keepdim=True) - d_lse
        # delta through P, through its sums, and through the rounded P and out.
        e_delta = (e_p * dp.abs() + u * (count + root) * p * b).sum(-1, keepdim=True)
        e_delta += u * (delta.abs() + d_lse.abs())
        w_delta = w * (
            (p * dp).norm(dim=-1, keepdim=True) + (out * d_out).norm(dim=-1, keepdim=True)
        )
        ds = p * (dp - delta)
        e_ds = e_p * (dp - delta).abs() + p * (u * root * b + e_delta)
        e_ds += u * p * (dp.abs() + delta.abs())

        e_dq = e_ds @ k.abs() + u * count * (ds.abs() @ k.abs())
        e_dq += w_delta * (p @ k).abs() + w * _rss(ds, k) + tiny * _rss(seen.double(), k)
        readers = self.readers[:, :, keys]
        e_dk = e_ds.mT @ q.abs() + u * readers * (ds.abs().mT @ q.abs())
        e_dk += _rss((p * w_delta).mT, q) + w * _rss(ds.mT, q)
        e_dv = e_p.mT @ d_out.abs() + u * readers * (p.mT @ d_out.abs())
        e_dv += w * _rss(p.mT, d_out)
        for part, x in ((e_dk, q), (e_dv, d_out)):
            part += tiny * _rss(seen.double().mT, x)

        self.terms[0][rows] = _by_row(e_out)
        self.terms[1][rows] = _by_row(e_lse).squeeze(-1)
        self.terms[2][rows] = _by_row(self.scale * e_dq + w * (self.scale * ds @ k).abs() + tiny)
        for at, part, total in (
            (3, self.scale * e_dk, self.scale * ds.mT @ q),
            (4, e_dv, p.mT @ d_out),
        ):
            part = part + w * total.abs() + tiny
            self.terms[at][keys] += part.sum(1).transpose(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        """``[n, Hq, C] -> [Hkv, group, n, C]``."""
        return torch.unflatten(x.transpose(0, 1), 0, (-1, self.group))


def _by_row(x: Tensor) -> Tensor:
    """``[Hkv, group, n, C] -> [n, Hq, C]``."""
    return x.flatten(0, 1).transpose(0, 1)


def _rss(a: Tensor, b: Tensor) -> Tensor:
    """Root of the sum of the squared terms of ``a @ b``."""
    squares: Tensor = a.square() @ b.square()
    return squares.sqrt()
