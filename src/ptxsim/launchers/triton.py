"""Run Triton kernels on CPU tensors, without a GPU or a driver.

    with simulate(arch=90) as session:               # unmodified host code
        kernel[grid](x, y, n, BLOCK=128)             # compiled for sm_90, run in the simulator

    compiled = triton.compile(ASTSource(...), target=GPUTarget("cuda", 100, 32))
    launch(compiled, grid=(8,), args=[x, y, n])      # or one compiled kernel, by hand

What a launch passes is what Triton's own launcher passes: the arguments in the order of the
signature without constexprs, host tensor descriptors as tensor map, shape and strides, and the
addresses of the two scratch buffers.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.compiler import CompiledKernel

import ptxsim
from ptxsim.errors import LaunchError
from ptxsim.module import MAX_SHARED
from ptxsim.tensor_maps import SWIZZLE_SPANS, encode

WARP = 32
# Element kinds of `tensormap.replace`, which Triton's descriptor metadata uses.
_ELEMENTS = {0: "u8", 1: "u16", 2: "u32", 4: "u64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}


@dataclass(frozen=True)
class Launch:
    """One kernel launch as host code asked for it; `grid` counts programs, not CTAs."""

    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: int
    ctas: int
    shared: int
    result: ptxsim.Result


@dataclass
class Session:
    """What `simulate` has run so far."""

    launches: list[Launch] = field(default_factory=list)


@lru_cache(maxsize=64)
def _module(ptx: str) -> ptxsim.Module:
    return ptxsim.load(ptx)


def launch(compiled: Any, grid: Sequence[int], args: Sequence[Any], **options: Any) -> Launch:
    """Run a compiled kernel on `grid` programs.

    `args` follow the kernel's signature without its constexprs: CPU tensors, numbers, host tensor
    descriptors, tuples of them.  `options` go to `ptxsim.Module.launch` (`seed`, `strict`, `memory`
    for tensors that the kernel reaches through other pointers).  Errors are `SimulationError`s.
    """
    kinds = [k for k in compiled.src.signature.values() if k != "constexpr"]
    if len(kinds) != len(args):
        raise LaunchError(f"{compiled.name} takes {len(kinds)} arguments, {len(args)} given")
    return _run(compiled.asm["ptx"], compiled.metadata, kinds, args, grid, options)


def _run(
    ptx: str,
    metadata: Any,
    kinds: Sequence[Any],
    args: Sequence[Any],
    grid: Sequence[int],
    options: dict[str, Any],
) -> Launch:
    module = _module(ptx)
    entry = module.ptx.entry(metadata.name)
    x, y, z = [*grid, 1, 1][:3]
    programs = (int(x), int(y), int(z))
    ctas = int(getattr(metadata, "num_ctas", 1))
    descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
    values: list[Any] = []
    memory = list(options.get("memory", ()))
    for kind, value in zip(kinds, args, strict=True):
        _flatten(kind, value, descriptors, (values, memory))
    count = programs[0] * programs[1] * programs[2] * ctas
    scratch = [_scratch(metadata, name, count) for name in ("global", "profile")]
    values += scratch[: len(entry.params) - len(values)]
    threads = entry.reqntid[0] if entry.reqntid else WARP * int(metadata.num_warps)
    result = module.launch(
        (programs[0] * ctas, programs[1], programs[2]),
        threads,
        values,
        kernel=metadata.name,
        cluster=ctas,
        shared=int(metadata.shared),
        **{**options, "memory": memory},
    )
    return Launch(ptx, metadata.name, programs, threads, ctas, int(metadata.shared), result)


def _flatten(
    kind: Any, value: Any, descriptors: Iterator[Any], found: tuple[list[Any], list[Any]]
) -> None:
    """Append the kernel parameters of one argument, and the memory behind a descriptor."""
    values, memory = found
    if kind == "constexpr":
        return
    if isinstance(kind, tuple):
        for inner_kind, inner in zip(kind, value, strict=True):
            _flatten(inner_kind, inner, descriptors, found)
    elif isinstance(kind, str) and kind.startswith("tensordesc"):
        memory.append(value.base)
        values.extend(_descriptor(value, next(descriptors, None)))
    else:
        values.append(value)


def _descriptor(value: Any, meta: dict[str, Any] | None) -> list[Any]:
    """Tensor map (or pointer and facts, where the target has no maps), shape, strides."""
    tail = [*map(int, value.shape), *map(int, value.strides)]
    if meta is None:
        flags = [value.padding == "nan"]
        if hasattr(value, "round_f32_to_tf32"):
            flags.append(bool(value.round_f32_to_tf32))
        return [value.base, *tail, *(int(f) for f in flags), *tail]
    if meta["elem_type"] not in _ELEMENTS or meta.get("is_im2col") or meta.get("fp4_padded"):
        raise LaunchError(f"a tensor descriptor of a kind that is not supported: {meta}")
    item = int(meta["elem_size"])
    tensor_map = encode(
        value.base.data_ptr(),
        _ELEMENTS[meta["elem_type"]],
        tuple(int(n) for n in reversed(value.shape)),
        tuple(int(s) * item for s in reversed(value.strides[:-1])),
        tuple(int(b) for b in reversed(meta["block_size"])),
        SWIZZLE_SPANS[meta["swizzle"]],
        value.padding == "nan",
    )
    return [tensor_map, *tail]


def _scratch(metadata: Any, name: str, count: int) -> Any:
    """A zeroed scratch buffer for all CTAs, at the alignment asked for; 0 if none is."""
    size = int(getattr(metadata, f"{name}_scratch_size", 0) or 0) * count
    if not size:
        return 0
    align = int(getattr(metadata, f"{name}_scratch_align", 1) or 1)
    raw = torch.zeros(size + align, dtype=torch.uint8)
    return raw[-raw.data_ptr() % align :][:size]


class _Utilities:
    """What the compiler asks of a device: its limits, and to load a binary."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": MAX_SHARED,
            "max_num_regs": 65536,
            "multiprocessor_count": 148,
            "warpSize": WARP,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[Any, str, int, int, int]:
        """(module, function, registers, spills, most threads); the function is the binary's key."""
        return name, _key(binary), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""


def _key(binary: bytes) -> str:
    return hashlib.sha256(binary).hexdigest()


class _Driver(DriverBase):  # type: ignore[misc]  # Triton's classes are untyped here
    """Stands for a device of one architecture, whose launches are simulated."""

    _numbers = itertools.count(1 << 16)

    def __init__(self, arch: int, session: Session, options: dict[str, Any]) -> None:
        super().__init__()
        self.target = GPUTarget("cuda", arch, WARP)
        self.session, self.options = session, options
        self.ptx_by_binary: dict[str, str] = {}
        self.utils = _Utilities()
        # Kernels are cached by device number: one of another architecture must not be found.
        self.number = next(self._numbers)

    @classmethod
    def is_active(cls) -> bool:
        return False  # never chosen by itself

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("launches go through Python, no launcher is generated")

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(int(self.target.arch), 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Autotuners run each candidate once and find all equally fast: there is no time here."""

        def run_once(
            call: Callable[[], Any], *, quantiles: Sequence[float], **_: Any
        ) -> list[float]:
            call()
            return [0.0] * len(quantiles)

        return run_once

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """The function that Triton calls for a launch of this kernel."""
        kinds = list(src.signature.values())

        def run(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            args = rest[4:]  # before them: packed metadata, launch metadata and two hooks
            done = _run(
                self.ptx_by_binary[function], metadata, kinds, args, (x, y, z), dict(self.options)
            )
            self.session.launches.append(done)

        return run


@contextlib.contextmanager
def simulate(arch: int = 100, **options: Any) -> Iterator[Session]:
    """Make `kernel[grid](...)` compile for `sm_<arch>` and run in the simulator on CPU tensors.

    `options` go to `ptxsim.Module.launch`.  The driver that was active is restored on exit.
    """
    session = Session()
    driver = _Driver(arch, session, options)
    previous = triton.runtime.driver._active
    construct = CompiledKernel.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if "ptx" in self.asm:
            driver.ptx_by_binary[_key(self.kernel)] = self.asm["ptx"]

    CompiledKernel.__init__ = remember
    triton.runtime.driver.set_active(driver)
    try:
        yield session
    finally:
        CompiledKernel.__init__ = construct
        triton.runtime.driver._active = previous
