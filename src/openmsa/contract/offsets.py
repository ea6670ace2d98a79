"""Reading packed offsets from users, once and on the host, with every check they need."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from openmsa.errors import invalid_input

__all__ = [
    "INTEGERS",
    "check_fragments",
    "check_offsets",
    "check_padding_mask",
    "check_tokens",
    "host_ints",
    "host_map",
    "host_parts",
    "mask_document_starts",
]

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1
_MASK_SLAB = 256


def host_ints(value: Sequence[int] | Tensor, argument: str) -> tuple[Tensor, torch.device]:
    """``value`` as an int64 host tensor, and the device it came from."""
    if not isinstance(value, Tensor):
        try:
            value = torch.tensor([operator.index(item) for item in value], dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            invalid_input(argument, "a sequence of integers", repr(value))
    if value.dtype not in INTEGERS:
        invalid_input(argument, "an integer dtype", value.dtype)
    return value.detach().to("cpu", torch.int64), value.device


def host_parts(parts: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.device]:
    """Several 1-D integer tensors in one copy to the host."""
    tensors = {}
    for name, value in parts.items():
        if not isinstance(value, Tensor):
            value = host_ints(value, name)[0]
        if value.dtype not in INTEGERS:
            invalid_input(name, "int32 or int64", value.dtype)
        if value.dim() != 1:
            invalid_input(name, "a 1-D tensor", f"shape {tuple(value.shape)}")
        tensors[name] = value.detach()
    source = next(iter(tensors.values())).device
    if all(value.device == source for value in tensors.values()):
        joined = torch.cat([value.long() for value in tensors.values()]).cpu()
        sizes = [value.numel() for value in tensors.values()]
        return dict(zip(tensors, joined.split(sizes), strict=True)), source
    return {name: value.to("cpu", torch.int64) for name, value in tensors.items()}, source


def host_map(
    value: Tensor, argument: str, dtypes: tuple[torch.dtype, ...] | None, kind: str
) -> Tensor:
    if not isinstance(value, Tensor):
        invalid_input(argument, f"{kind} of shape [B, S]", type(value).__name__)
    if dtypes is not None and value.dtype not in dtypes:
        invalid_input(argument, kind, value.dtype)
    if value.dim() != 2:
        invalid_input(argument, "shape [B, S]", f"shape {tuple(value.shape)}")
    return value.detach().cpu()


def check_padding_mask(host: Tensor) -> None:
    """Raise :class:`InvalidInput` for what a padding mask does not hold, as the masks that are
    added to scores do, in which 0 means the opposite."""
    wrong = host[~((host >= 0) & host.isfinite())]  # a NaN is neither below 0 nor at least 0
    if wrong.numel():
        kind = "0 for padding and positive numbers for real tokens"
        hint = "if it is added to scores, pass mask == 0" if bool((wrong < 0).all()) else ""
        invalid_input("attention_mask", kind, wrong[0].item(), hint)


def check_tokens(tokens: float) -> None:
    """Raise :class:`InvalidInput` where int32 offsets cannot count ``tokens``; a float64 sum does
    not wrap around as an int64 one does."""
    if tokens > _INT32_MAX:
        invalid_input("tokens", f"at most {_INT32_MAX} (int32 offsets)", int(tokens))


def check_offsets(name: str, offsets: Tensor) -> None:
    if offsets.numel() < 1:
        invalid_input(name, "at least one offset (a leading 0)", "an empty tensor")
    if int(offsets[0]) != 0:
        invalid_input(name, "a leading 0", int(offsets[0]))
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0])
        invalid_input(
            name,
            "offsets that never fall",
            f"{int(offsets[at])} then {int(offsets[at + 1])} at document {at}",
        )


def check_fragments(heads: Tensor, count: int) -> None:
    if heads.numel() != count:
        invalid_input("fragment_indices", f"one entry per document ({count})", heads.numel())
    entries = torch.arange(count)
    outside = ((heads < 0) | (heads > entries)).nonzero()
    if outside.numel():
        at = int(outside[0])
        invalid_input(
            "fragment_indices",
            f"0..{at} at entry {at}",
            int(heads[at]),
            "the first entry of the same document",
        )
    wrong = (heads[heads] != heads).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        invalid_input(
            "fragment_indices",
            "the first entry of the document",
            f"{int(heads[at])} at entry {at}, which is itself a later fragment",
        )
    falls = (heads[1:] < heads[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0]) + 1
        invalid_input(
            "fragment_indices",
            "the fragments of a document side by side",
            f"{int(heads[at])} at entry {at} after {int(heads[at - 1])}",
            "its keys would overlap another document's",
        )


def mask_document_starts(mask: Tensor) -> Tensor:
    """Host int64 ``[B, S]``: the start of each row's document, -1 at padding; verified whole."""
    if not isinstance(mask, Tensor):
        invalid_input("mask", "a bool tensor of shape [B, 1, S, S]", type(mask).__name__)
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        invalid_input("mask", "a [B, 1, S, S] tensor", f"shape {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        invalid_input("mask", "torch.bool", mask.dtype)
    host = mask[:, 0].cpu()
    batch, length = host.shape[:2]
    column = torch.arange(length)
    if length == 0:
        return host.new_zeros((batch, 0), dtype=torch.long)
    # Row i of a document that starts at s is True exactly on s..i, so its first True column is
    # the document's start; a padding row has none.
    first = torch.where(host.any(-1), host.long().argmax(-1), -1)
    for begin in range(0, length, _MASK_SLAB):
        rows = column[begin : begin + _MASK_SLAB]
        start = first[:, rows, None]
        # A key before a document's own start, or at padding, belongs to nobody.
        same = (first[:, None, :] == start) & (start >= 0)
        expected = same & (column[None, None, :] <= rows[None, :, None])
        wrong = (host[:, rows] != expected).flatten(1).any(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            query = int((host[row, rows] != expected[row]).any(-1).nonzero()[0]) + begin
            invalid_input(
                "mask",
                "causal attention within contiguous documents",
                f"something else in batch row {row}, query {query}",
            )
    return first
