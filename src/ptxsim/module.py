"""The public interface: load a PTX text and launch its kernels on NumPy arrays or CPU tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxsim import parallel
from ptxsim.decode import Program, decode
from ptxsim.errors import LaunchError, SimulationError, UnsupportedInstruction
from ptxsim.lint import Form
from ptxsim.machine import Machine, Options
from ptxsim.memory import GlobalMemory, zeroed
from ptxsim.parser import parse
from ptxsim.ptx import Kernel, Parameter, PtxModule
from ptxsim.scheduler import Scheduler, exit_lanes

MAX_SHARED = 232_448  # opt-in dynamic shared memory of a block on sm_90 and sm_100


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished launch tells: dynamic warp instructions and warnings of strict rules."""

    steps: int
    warnings: tuple[str, ...]


class Module:
    """A parsed PTX file; kernels are decoded at their first launch."""

    def __init__(self, text: str) -> None:
        self.ptx: PtxModule = parse(text)
        self._programs: dict[str, Program] = {}
        self._globals, self._global_addresses = _place_globals(self.ptx)

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels."""
        return list(self.ptx.kernels)

    def program(self, kernel: str | None = None) -> Program:
        """The decoded kernel."""
        entry = self.ptx.entry(kernel)
        if entry.name not in self._programs:
            program = decode(self.ptx, entry, self._global_addresses)
            program.steps.append(exit_lanes)  # falling off the end
            program.defs.append(())
            self._programs[entry.name] = program
        return self._programs[entry.name]

    def use(self, program: Program) -> None:
        """Run this from now on where its kernel is launched (see trace.py)."""
        self._programs[program.kernel.name] = program

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        kernel: str | None = None,
        cluster: int | Sequence[int] | None = None,
        seed: int = 0,
        shared: int = 0,
        memory: Sequence[Any] = (),
        strict: bool = False,
        races: bool = False,
        processes: int = 1,
    ) -> Result:
        """Run one launch to its end, its clusters spread over `processes` processes.

        `strict` makes errors of rules that shipping code breaks; `races` finds unordered accesses
        of shared and tensor memory (see races.py), at about twice the time.

        `args` has one entry per kernel parameter: an array or tensor (its address is passed, and
        the kernel may touch all of its storage), a number, or `bytes` of the parameter's size.
        `memory` names further buffers that kernels may touch: arrays, tensors or (address, bytes).
        Arrays are used in place.  Raises a `SimulationError` naming the PTX line, warp and address.
        """
        entry = self.ptx.entry(kernel)
        try:
            program = self.program(kernel)
            buffers = list(self._globals) + [_extent(m) for m in memory]
            params = _pack(program, entry, args, buffers)
            machine = Machine(
                program,
                GlobalMemory(buffers),
                params,
                _shape(grid),
                _shape(block),
                _shape(cluster or entry.reqcluster or 1),
                shared,
                Options(seed=seed, strict=strict, races=races),
            )
            _check_launch(machine, entry)
            clusters = _first_ctas(machine)
            if processes > 1 and len(clusters) > 1:
                parallel.run(machine, clusters, min(processes, len(clusters)))
            else:
                left = iter(clusters)
                machine.next_cluster = lambda: next(left, None)
                Scheduler(machine).run()
        except SimulationError as error:
            raise self._explained(error) from error.__cause__
        return Result(machine.steps, tuple(machine.warnings))

    def _explained(self, error: SimulationError) -> SimulationError:
        if error.line is not None:
            if error.text is None and error.line <= len(self.ptx.lines):
                error.text = self.ptx.lines[error.line - 1].strip()
            before = [at for at in self.ptx.locations if at <= error.line]
            if before:
                error.source = self.ptx.locations[max(before)]
        return error

    def survey(self, kernel: str | None = None) -> list[Form]:
        """Every instruction form with its count and what keeps it from running."""
        from ptxsim.lint import survey

        return survey(self.ptx, self._global_addresses, kernel)

    def unsupported(self, kernel: str | None = None) -> list[UnsupportedInstruction]:
        """Every instruction without semantics here, each as the error it would raise."""
        from ptxsim.lint import unsupported

        return unsupported(self.ptx, self._global_addresses, kernel)


def load(ptx: str | Path) -> Module:
    """A module from PTX text, or from the path of a file."""
    if isinstance(ptx, Path) or ("\n" not in ptx and Path(ptx).exists()):
        return Module(Path(ptx).read_text())
    return Module(str(ptx))


def _place_globals(module: PtxModule) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Memory for module-scope .global and .const variables."""
    buffers, addresses = [], {}
    for variable in module.variables:
        if variable.space not in ("global", "const") or variable.size == 0:
            continue
        data = zeroed(variable.size + variable.align)
        start = -data.ctypes.data % variable.align
        if variable.data is not None:
            data[start : start + variable.size] = np.frombuffer(variable.data, np.uint8)
        _KEPT_GLOBALS.append(data)
        addresses[variable.name] = data.ctypes.data + start
        buffers.append((data.ctypes.data + start, variable.size))
    return buffers, addresses


_KEPT_GLOBALS: list[np.ndarray] = []  # decoded programs hold the addresses


def _shape(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(values) <= 3:
        raise LaunchError(f"a shape of {len(values)} numbers; 1 to 3 are needed")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _extent(value: Any) -> tuple[int, int]:
    """Address and bytes of a buffer."""
    if isinstance(value, tuple):
        return int(value[0]), int(value[1])
    if isinstance(value, np.ndarray):
        base: Any = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if not base.flags.c_contiguous:
            raise LaunchError("an array whose memory is not one block")
        return base.ctypes.data, base.nbytes
    if hasattr(value, "untyped_storage"):  # a torch tensor, without importing torch
        if value.device.type != "cpu":
            raise LaunchError(f"a tensor on {value.device}; the simulator works on CPU memory")
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    raise LaunchError(f"{type(value).__name__} is no buffer: an array or CPU tensor is needed")


def _address(value: Any) -> int:
    return value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()


def _pack(
    program: Program, entry: Kernel, args: Sequence[Any], buffers: list[tuple[int, int]]
) -> np.ndarray:
    if len(args) != len(entry.params):
        raise LaunchError(f"{entry.name} takes {len(entry.params)} arguments, {len(args)} given")
    # Some slack behind, so that a wide read of the last parameter stays inside.
    data = zeroed(program.decoder.param_size)
    for parameter, value in zip(entry.params, args, strict=True):
        raw = _raw(parameter, value, buffers)
        start = program.decoder.param_offsets[parameter.name]
        data[start : start + parameter.size] = np.frombuffer(raw, np.uint8)
    return data


def _raw(parameter: Parameter, value: Any, buffers: list[tuple[int, int]]) -> bytes:
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "iub" else value.tobytes()
    if isinstance(value, np.ndarray) or hasattr(value, "untyped_storage"):
        buffers.append(_extent(value))
        value = _address(value)
    if isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
    elif isinstance(value, float):
        raw = struct.pack("<d" if parameter.type == "f64" else "<f", value)
    elif isinstance(value, int):
        if parameter.type in ("f32", "f64"):
            return _raw(parameter, float(value), buffers)
        bits = value & ((1 << (8 * parameter.size)) - 1)
        raw = bits.to_bytes(parameter.size, "little")
    else:
        raise LaunchError(f"{parameter.name}: {type(value).__name__} cannot be an argument")
    if len(raw) != parameter.size:
        raise LaunchError(f"{parameter.name}: {len(raw)} bytes given, {parameter.size} expected")
    return raw


def _check_launch(machine: Machine, entry: Kernel) -> None:
    threads = machine.block[0] * machine.block[1] * machine.block[2]
    if not 1 <= threads <= 1024:
        raise LaunchError(f"a block of {threads} threads; 1 to 1024 are possible")
    if entry.reqntid is not None and entry.reqntid != machine.block:
        raise LaunchError(f"{entry.name} requires blocks of {entry.reqntid}, not {machine.block}")
    if any(g <= 0 or g % c for g, c in zip(machine.grid, machine.cluster, strict=True)):
        raise LaunchError(f"grid {machine.grid} is no multiple of the cluster {machine.cluster}")
    total = machine.shared + machine.program.decoder.static_shared
    if not 0 <= total <= MAX_SHARED:
        raise LaunchError(f"{total} bytes of shared memory; at most {MAX_SHARED} exist")


def _first_ctas(machine: Machine) -> list[tuple[int, int, int]]:
    grid, cluster = machine.grid, machine.cluster
    return [
        (x, y, z)
        for z in range(0, grid[2], cluster[2])
        for y in range(0, grid[1], cluster[1])
        for x in range(0, grid[0], cluster[0])
    ]
