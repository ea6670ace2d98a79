"""`ptxsim`: executes compiled NVIDIA PTX on a CPU, function not time, with a sanitizer.

    module = ptxsim.load(Path("kernel.ptx"))
    module.launch(grid=4, block=128, args=[x, y, n], shared=4096)

See docs/ptxsim.md for what is supported and how it is proved.
"""

from ptxsim.errors import (
    AsyncHazard,
    BarrierError,
    DataRace,
    Deadlock,
    DivergenceError,
    InvalidOperand,
    LaunchError,
    Misaligned,
    MissingFence,
    OutOfBounds,
    ParseError,
    SimulationError,
    TensorMemoryError,
    UninitialisedRead,
    UnsupportedInstruction,
)
from ptxsim.explorer import Outcome, explore
from ptxsim.module import Module, Result, load

__all__ = [
    "AsyncHazard",
    "BarrierError",
    "DataRace",
    "Deadlock",
    "DivergenceError",
    "InvalidOperand",
    "LaunchError",
    "Misaligned",
    "MissingFence",
    "Module",
    "OutOfBounds",
    "Outcome",
    "ParseError",
    "Result",
    "SimulationError",
    "TensorMemoryError",
    "UninitialisedRead",
    "UnsupportedInstruction",
    "explore",
    "load",
]
