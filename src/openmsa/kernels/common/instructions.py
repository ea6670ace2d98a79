"""What a kernel's PTX says it does: instructions by the pipe that runs them, and matrix products.

Counts are of the text: an instruction in a loop counts once, and so does each copy of an unrolled
one. PTX is not yet machine code: ptxas joins neighbouring loads of shared memory, say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["PIPES", "Product", "by_pipe", "products", "tensor_columns"]

_RULES: tuple[tuple[str, str], ...] = (
    ("tensor", r"(tcgen05\.mma|wgmma\.mma_async|mma\.sync|wmma\.mma)\b"),
    ("copy engine", r"cp\.(reduce\.)?async\.bulk\b(?!\.(commit_group|wait_group))"),
    ("tensor memory", r"tcgen05\.(ld|st|cp|shift|alloc|dealloc|relinquish_alloc_permit)\b"),
    ("barriers", r"(mbarrier|bar|barrier|fence|membar|tcgen05|wgmma|cp\.async)\b"),
    ("mufu", r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\b"),
    ("shared", r"(ld|st|atom|red|ldmatrix|stmatrix)\b.*\.shared\b"),
    ("shared", r"(ldmatrix|stmatrix)\b"),
    ("local", r"(ld|st)\.local\b"),
    ("global", r"(cp\.async|(ld|st|atom|red|multimem|prefetch)\b(?!\.param))"),
    ("fma", r"(fma|mul|add|sub|mad)\b.*\.(f32|f32x2|f16|f16x2|bf16|bf16x2|f64)$"),
    ("control", r"(bra|brx|call|ret|exit|trap|setmaxnreg|elect|vote|match|activemask|nanosleep)\b"),
    ("control", r"(shfl|redux|griddepcontrol)\b"),
    ("moves", r"(mov|cvta|ld\.param|isspacep|mapa|getctarank)\b"),
    ("alu", r"[a-z]"),
)
"""A pipe's name and what begins its instructions; the first rule that fits decides."""

PIPES = tuple(dict.fromkeys(pipe for pipe, _ in _RULES))
"""Every pipe that `by_pipe` tells apart, the rest of integer work last."""

_COMPILED = tuple((pipe, re.compile(rule)) for pipe, rule in _RULES)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"\s*([$\w]+):(?!:)\s*")
_INSTRUCTION = re.compile(r"(?:@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)\b\s*(.*)", re.DOTALL)
_VECTOR = re.compile(r"\{[^{}]*\}")
_MMA = re.compile(
    r"\[(?P<target>[^\]]+)\],\s*(?P<a>\[[^\]]+\]|[^,]+),\s*(?P<b>[^,]+),\s*(?P<descriptor>[^,]+)"
)
_WGMMA = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_K_BYTES = 32  # of a dense tcgen05 product's inner dimension, whatever the type
_WIDTHS = {"f16": 2, "tf32": 4, "f8f6f4": 1, "i8": 1}


@dataclass(frozen=True)
class Product:
    """One matrix instruction.

    Attributes:
        m, n, k: its shape; 0 where the text does not tell.
        source: "SS" or "TS": where the first operand lies, shared or tensor memory (on Hopper
            "RS", registers).
        target, first: registers that hold the address of the sums and of the first operand.
        loop: the number of loops around it.
    """

    m: int
    n: int
    k: int
    source: str
    target: str
    first: str
    loop: int


def by_pipe(ptx: str) -> dict[str, int]:
    """Instructions of every kernel in ``ptx`` by pipe, with a 0 for each pipe without any."""
    found = Counter(_pipe(opcode) for opcode, _, _ in _statements(ptx) if opcode)
    return {pipe: found[pipe] for pipe in PIPES}


def tensor_columns(ptx: str) -> int:
    """Columns of tensor memory that a thread block takes at a time, as far as the text tells: the
    sum over its allocations."""
    total = 0
    numbers: dict[str, int] = {}
    for opcode, operands, _ in _statements(ptx):
        _remember(numbers, opcode, operands)
        if opcode.startswith("tcgen05.alloc"):
            total += _number(numbers, operands.rpartition(",")[2]) or 0
    return total


def products(ptx: str) -> tuple[Product, ...]:
    """Matrix instructions in the order of the text."""
    statements = list(_statements(ptx))
    labels = {label: at for at, (_, _, label) in enumerate(statements) if label}
    loops = [
        (labels[target], at)
        for at, (opcode, operands, _) in enumerate(statements)
        if opcode.startswith("bra") and labels.get(target := operands.strip(), at) < at
    ]
    heads = {first: max(end for begin, end in loops if begin == first) for first, _ in loops}
    numbers: dict[str, int] = {}
    found = []
    for at, (opcode, operands, _) in enumerate(statements):
        _remember(numbers, opcode, operands)
        if opcode.startswith(("tcgen05.mma", "wgmma.mma_async")):
            depth = sum(first <= at <= end for first, end in heads.items())
            found.append(_product(opcode, operands, numbers, depth))
    return tuple(found)


def _product(opcode: str, operands: str, numbers: dict[str, int], loop: int) -> Product:
    shape = _WGMMA.search(opcode)
    if shape is not None:
        m, n, k = map(int, shape.groups())
        groups = _VECTOR.findall(operands)
        first = _VECTOR.sub("", operands).strip(", ").partition(",")[0]
        return Product(m, n, k, "RS" if len(groups) > 1 else "SS", "".join(groups[:1]), first, loop)
    parts = _MMA.search(operands)
    if parts is None:
        return Product(0, 0, 0, "SS", "", "", loop)
    # The instruction descriptor: N / 8 in bits 17..22, M / 16 in bits 24..28.
    descriptor = _number(numbers, parts["descriptor"]) or 0
    kind = re.search(r"kind::(\w+)", opcode)
    width = _WIDTHS.get(kind[1] if kind else "", 0)
    return Product(
        m=(descriptor >> 24 & 31) * 16,
        n=(descriptor >> 17 & 63) * 8,
        k=_K_BYTES // width if width and descriptor else 0,
        source="TS" if parts["a"].startswith("[") else "SS",
        target=parts["target"].strip(),
        first=parts["a"].strip(),
        loop=loop,
    )


def _statements(ptx: str) -> Iterator[tuple[str, str, str]]:
    """Opcode, operands and "" of each instruction, or "", "" and the name of each label."""
    for body in _bodies(_COMMENT.sub("", ptx)):
        for piece in body.split(";"):
            rest = piece.strip().lstrip("{} \t\n")
            while (label := _LABEL.match(rest)) is not None:
                yield "", "", label[1]
                rest = rest[label.end() :].lstrip("{} \t\n")
            found = _INSTRUCTION.match(rest)
            if found is not None:
                yield found[1], found[2], ""


def _bodies(text: str) -> Iterator[str]:
    """The text between the outermost braces of each function; its head has no such braces."""
    depth, begin = 0, 0
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            depth += 1
            if depth == 1:
                begin = brace.end()
        else:
            depth -= 1
            if depth == 0:
                yield text[begin : brace.start()]


def _pipe(opcode: str) -> str:
    return next(pipe for pipe, rule in _COMPILED if rule.match(opcode))


def _remember(numbers: dict[str, int], opcode: str, operands: str) -> None:
    """Note what a register was last given, if that is a number."""
    if opcode.startswith("mov"):
        target, _, value = operands.partition(",")
        try:
            numbers[target.strip()] = int(value.strip().rstrip("U"), 0)
        except ValueError:
            numbers.pop(target.strip(), None)


def _number(numbers: dict[str, int], operand: str) -> int | None:
    """A number, or the one that the register holds."""
    text = operand.strip()
    return int(text, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text) else numbers.get(text)
