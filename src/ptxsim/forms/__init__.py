"""The table of supported instruction forms, with the section of the PTX ISA that each follows.

It is documentation: `docs/ptxsim.md` prints it (`python -m ptxsim.forms FILE` renews the tables),
and tests hold it against the decoder, in both directions, and against NVIDIA's assembler.
"""

from ptxsim.forms.arithmetic import ARITHMETIC
from ptxsim.forms.grammar import Entry, expand, markdown, normal, sample
from ptxsim.forms.matrix import MATRIX
from ptxsim.forms.memory import MEMORY
from ptxsim.forms.synchronisation import SYNCHRONISATION

# Chapters of the documentation, in order.
CHAPTERS: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    ("Arithmetic, comparison, logic, conversion", ARITHMETIC),
    ("Control flow, memory, copies", MEMORY),
    ("Synchronisation and communication", SYNCHRONISATION),
    ("Matrix instructions and tensor memory", MATRIX),
)

__all__ = ["CHAPTERS", "Entry", "expand", "markdown", "normal", "sample"]
