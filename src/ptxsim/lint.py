"""What a PTX file uses, and what of it has no semantics here."""

from __future__ import annotations

from collections import Counter

from ptxsim.decode import Decoder, build
from ptxsim.errors import UnsupportedInstruction
from ptxsim.ptx import Kernel, PtxModule


def forms(module: PtxModule) -> Counter[str]:
    """How often each instruction form occurs."""
    return Counter(ins.form for kernel in module.kernels.values() for ins in kernel.code)


def unsupported(
    module: PtxModule, global_addresses: dict[str, int], kernel: str | None = None
) -> list[UnsupportedInstruction]:
    """Decode every instruction and collect the failures instead of stopping at the first."""
    import ptxsim.isa  # noqa: F401  (registers the builders)

    found = []
    chosen = [module.entry(kernel)] if kernel else list(module.kernels.values())
    for entry in chosen:
        found.extend(_unsupported(module, entry, global_addresses))
    return found


def _unsupported(
    module: PtxModule, entry: Kernel, global_addresses: dict[str, int]
) -> list[UnsupportedInstruction]:
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
