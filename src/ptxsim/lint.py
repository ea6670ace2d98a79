"""What a PTX file uses, what of it cannot run here, and what looks wrong without running it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ptxsim.decode import Decoder, Program, build
from ptxsim.errors import UnsupportedInstruction
from ptxsim.ptx import Kernel, PtxModule

# Opened by the first and ended by the second: a kernel with one and not the other is suspicious.
_PAIRS = (
    ("tcgen05.alloc", "tcgen05.dealloc", "tensor memory is allocated and never freed"),
    ("wgmma.mma_async", "wgmma.wait_group", "wgmmas are issued and never waited for"),
    ("cp.async.ca", "cp.async.wait", "cp.async is never waited for"),
    ("cp.async.cg", "cp.async.wait", "cp.async is never waited for"),
    ("cp.async.bulk.tensor", "mbarrier.init", "a tensor copy without any mbarrier"),
    ("barrier.cluster.arrive", "barrier.cluster.wait", "a cluster barrier is never waited for"),
)


@dataclass(slots=True)
class Form:
    """One instruction form of a file: how often, where first, and why it cannot run (if so)."""

    name: str
    count: int = 0
    line: int = 0
    reasons: list[UnsupportedInstruction] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Note:
    """Something suspicious, at a line."""

    line: int
    message: str


def forms(module: PtxModule, kernel: str | None = None) -> Counter[str]:
    """How often each instruction form occurs."""
    return Counter(ins.form for entry in _chosen(module, kernel) for ins in entry.code)


def survey(
    module: PtxModule, global_addresses: dict[str, int], kernel: str | None = None
) -> list[Form]:
    """Every instruction form, the most frequent first, with what keeps it from running."""
    found: dict[str, Form] = {}
    for entry in _chosen(module, kernel):
        for ins in entry.code:
            form = found.setdefault(ins.form, Form(ins.form, 0, ins.line))
            form.count += 1
        for error in _unsupported(module, entry, global_addresses):
            code = next(ins for ins in entry.code if ins.line == error.line)
            found[code.form].reasons.append(error)
    return sorted(found.values(), key=lambda form: (-form.count, form.name))


def unsupported(
    module: PtxModule, global_addresses: dict[str, int], kernel: str | None = None
) -> list[UnsupportedInstruction]:
    """Decode every instruction and collect the failures instead of stopping at the first."""
    return [
        error
        for entry in _chosen(module, kernel)
        for error in _unsupported(module, entry, global_addresses)
    ]


def _chosen(module: PtxModule, kernel: str | None) -> list[Kernel]:
    return [module.entry(kernel)] if kernel else list(module.kernels.values())


def _unsupported(
    module: PtxModule, entry: Kernel, global_addresses: dict[str, int]
) -> list[UnsupportedInstruction]:
    import ptxsim.isa  # noqa: F401  (registers the builders)

    shared = [v for v in module.variables if v.space == "shared"]
    decoder = Decoder(entry, global_addresses, shared)
    found = []
    for pc, ins in enumerate(entry.code):
        decoder.pc = pc
        try:
            build(ins, decoder)
        except UnsupportedInstruction as error:
            found.append(error)
    return found


def notes(program: Program) -> list[Note]:
    """Suspicions about one decoded kernel: they may be wrong, so they are no errors."""
    return sorted(_unwritten(program) + _unpaired(program), key=lambda note: note.line)


def _unwritten(program: Program) -> list[Note]:
    """Registers that some path reads before any instruction wrote them."""
    live, kernel = program.live[0], program.kernel
    found = []
    for register in kernel.registers:
        if not live >> register.slot & 1:
            continue
        line = next(
            (ins.line for ins in kernel.code if _mentions(ins.text, register.name)),
            kernel.code[0].line,
        )
        found.append(Note(line, f"{register.name} may be read before it is written"))
    return found


def _mentions(text: str, name: str) -> bool:
    at = text.find(name)
    while at >= 0:
        after = text[at + len(name) : at + len(name) + 1]
        if not (after.isalnum() or after in ("_", "$")) or not after:
            return True
        at = text.find(name, at + 1)
    return False


def _unpaired(program: Program) -> list[Note]:
    code = program.kernel.code
    found = []
    for first, second, message in _PAIRS:
        opening = [ins.line for ins in code if ins.form.startswith(first)]
        if opening and not any(ins.form.startswith(second) for ins in code):
            found.append(Note(opening[0], message))
    return found
