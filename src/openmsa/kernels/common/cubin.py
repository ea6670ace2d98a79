"""What a compiled kernel takes of an SM, read from its cubin: an ELF file with NVIDIA's sections.

``.nv.info`` is a list of attributes: a byte of format, a byte of kind, two bytes of size, and so
many bytes (format 4). Those of interest hold the index of the kernel's symbol and a number. Kinds
are those of CUDA 12 and 13, as ``cuobjdump --dump-elf`` names them.

From compute capability 9.0 on, the section of a kernel's shared memory begins with 1,024 bytes that
belong to the system. They do not count against what a thread block may have (227 KiB on 9.0 and
10.x), and ``ptxas -v`` leaves them out too; ``cuobjdump`` does not.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Resources", "resources"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SIZED = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F
_SYMBOLS = 2  # section type
_RESERVED = 1024


@dataclass(frozen=True)
class Resources:
    """One kernel entry of a cubin.

    Attributes:
        entry: the kernel's name.
        registers: of a thread, at launch; warps may trade them later.
        stack: bytes of a thread's local memory. Spilled registers go there: 0 is no spill.
        shared: bytes of static shared memory, on compute capability 9.0 or later.
    """

    entry: str
    registers: int
    stack: int
    shared: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def resources(cubin: bytes) -> tuple[Resources, ...]:
    """Every entry of ``cubin``, in the order of its sections.

    Raises:
        ValueError: not a cubin.
    """
    try:
        return _resources(cubin)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a cubin that can be read: {error!r}") from error


def _resources(cubin: bytes) -> tuple[Resources, ...]:
    header = _HEADER.unpack_from(cubin)
    if header[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a cubin: no 64-bit ELF file")
    first, size, count, names_at = header[6], header[11], header[12], header[13]
    headers = [_SECTION.unpack_from(cubin, first + size * at) for at in range(count)]
    names = [_text(cubin, headers[names_at][4] + section[0]) for section in headers]
    sections = dict(zip(names, headers, strict=True))
    # There is a second table for another code format, under a name of its own.
    symbols = sections[".symtab"]
    if symbols[1] != _SYMBOLS:
        raise ValueError("not a cubin: .symtab holds no symbols")
    strings = headers[symbols[6]][4]
    found: dict[tuple[str, int], int] = {}
    for symbol, kind, value in _attributes(cubin, sections[".nv.info"]):
        name = _SYMBOL.unpack_from(cubin, symbols[4] + _SYMBOL.size * symbol)[0]
        found[_text(cubin, strings + name), kind] = value
    entries = [name.removeprefix(".text.") for name in names if name.startswith(".text.")]
    return tuple(
        Resources(
            entry,
            found[entry, _REGISTERS],
            found.get((entry, _FRAME_SIZE), 0),
            max(0, sections.get(f".nv.shared.{entry}", (0,) * 6)[5] - _RESERVED),
        )
        for entry in entries
        if (entry, _REGISTERS) in found
    )


def _attributes(cubin: bytes, section: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Symbol, kind and number of each attribute that has these."""
    at, end = section[4], section[4] + section[5]
    found = []
    while at < end:
        layout, kind, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if layout == _SIZED:
            if size == 8:
                symbol, value = struct.unpack_from("<II", cubin, at)
                found.append((symbol, kind, value))
            at += size
    return found


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(0, at)].decode()
