"""Run *unmodified* compiled CuTe DSL host functions on CPU tensors, without a driver.

    from ptxsim.launchers import cute

    with cute.simulate(arch="sm_100a") as session:     # before or after `import cutlass`
        compiled = cutlass.cute.compile(fn, *fake_tensors)
        compiled(*cpu_tensors)                         # launches run in the simulator
    session.launches[0].kernel, session.launches[0].grid

The DSL's compiled host function encodes tensor maps and packs parameters itself and then calls a
small C library; `cute_runtime.c` takes that library's place and hands each launch to Python.  The
PTX of a launch is found by the hash of the cubin that the host function loads: names are not
unique, cubins are.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import ptxsim
from ptxsim.launchers.tensors import KnownTensors, as_cuda_dlpack, is_cpu_tensor

_FATBIN_HEADER = struct.Struct("<IHHQ")
_FATBIN_MAGIC = 0xBA55ED50
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host function asked for it."""

    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    params: tuple[bytes, ...]


@dataclass
class Session:
    """What `simulate` recorded: every launch, and the tensors whose memory kernels may touch."""

    run: Callable[[Launch, KnownTensors], None]
    launches: list[Launch] = field(default_factory=list)
    tensors: KnownTensors = field(default_factory=KnownTensors)
    ptx_by_cubin: dict[str, str] = field(default_factory=dict)
    failure: BaseException | None = None

    def register(self, cubin: bytes, ptx: str) -> None:
        """Remember which PTX a cubin was made from."""
        self.ptx_by_cubin[hashlib.sha256(cubin).hexdigest()] = ptx


def build_runtime(folder: Path | None = None) -> Path:
    """Compile `cute_runtime.c` once into `folder` (a per-user cache by default)."""
    source = Path(__file__).with_name("cute_runtime.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = folder or Path(tempfile.gettempdir()) / f"ptxsim-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"cute_runtime_{digest}.so"
    if library.exists():
        return library
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise RuntimeError(
            "the CuTe launcher needs a C compiler (cc, gcc or clang) for its runtime library"
        )
    scratch = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(scratch), str(source)]
    subprocess.run(command, check=True)
    scratch.rename(library)  # atomic: two processes may build at once
    return library


def payload_of(fatbin_address: int) -> bytes:
    """The cubin inside the fat binary at `fatbin_address`."""
    magic, _, header_size, _ = _FATBIN_HEADER.unpack(
        ctypes.string_at(fatbin_address, _FATBIN_HEADER.size)
    )
    if magic != _FATBIN_MAGIC:  # a bare cubin: not seen from the DSL, and its size is unknown
        raise RuntimeError(f"a module image of unknown kind (magic {magic:#x})")
    entry = fatbin_address + header_size
    entry_header, payload = struct.unpack("<IQ", ctypes.string_at(entry + 4, 12))
    return ctypes.string_at(entry + entry_header, payload)


def _make_callback(session: Session) -> Any:
    def on_launch(image: int, name: bytes, shape: Any, shared: int, params: Any) -> int:
        try:
            cubin = payload_of(image)
            ptx = session.ptx_by_cubin.get(hashlib.sha256(cubin).hexdigest())
            if ptx is None:
                raise RuntimeError(
                    f"no PTX is known for kernel {name.decode()}: it was compiled outside "
                    "cute.simulate(), or without CUTE_DSL_KEEP=ptx,cubin"
                )
            launch = _read_launch(ptx, name.decode(), list(shape[:9]), shared, params)
            session.launches.append(launch)
            session.run(launch, session.tensors)
        except BaseException as error:
            # An exception cannot cross the C frames: it is raised when the context or call ends.
            session.failure = session.failure or error
            return 1
        return 0

    return _CALLBACK(on_launch)


def _read_launch(ptx: str, name: str, shape: list[int], shared: int, params: Any) -> Launch:
    sizes = [p.size for p in module_of(ptx).ptx.entry(name).params]
    # The parameters live on the host function's stack: copy the bytes now.
    values = tuple(ctypes.string_at(params[i], size) for i, size in enumerate(sizes))
    grid, block, cluster = tuple(shape[0:3]), tuple(shape[3:6]), tuple(shape[6:9])
    return Launch(ptx, name, grid, block, cluster, shared, values)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def module_of(ptx: str) -> ptxsim.Module:
    """The module of a PTX text; one that was launched before is not decoded again."""
    return ptxsim.load(ptx)


def run_launch(launch: Launch, tensors: KnownTensors, **options: Any) -> None:
    """Execute one recorded launch in the simulator."""
    module_of(launch.ptx).launch(
        launch.grid,
        launch.block,
        launch.params,
        kernel=launch.kernel,
        cluster=launch.cluster,
        shared=launch.shared,
        memory=tensors.buffers(),
        **options,
    )


@contextlib.contextmanager
def simulate(
    arch: str = "sm_100a",
    run: Callable[[Launch, KnownTensors], None] | None = None,
    **options: Any,
) -> Iterator[Session]:
    """Make the DSL compile for `arch` and run its launches in the simulator.

    `run(launch, tensors)` replaces the execution (to record only, say); otherwise `options` go to
    `ptxsim.Module.launch` (`seed`, `processes`, ...).  Everything patched is restored on exit.  A
    failed launch is raised from the host function's call, or on exit at the latest.
    """
    session = Session(run or (lambda launch, known: run_launch(launch, known, **options)))
    library_path = build_runtime()
    with contextlib.ExitStack() as stack:
        dump = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptxsim-"))
        _set_environment(stack, library_path, arch, dump)
        import cutlass  # noqa: F401  (its import reads the environment)

        # The import puts the stock library of the toolkit flavour it chose in front: ours leads.
        others = [x for x in os.environ["CUTE_DSL_LIBS"].split(":") if x != str(library_path)]
        os.environ["CUTE_DSL_LIBS"] = ":".join([str(library_path), *others])
        library = ctypes.CDLL(str(library_path))
        callback = _make_callback(session)
        library.ptxsim_set_launch_callback(callback)
        stack.callback(library.ptxsim_set_launch_callback, _CALLBACK())
        _patch_dsl(stack, session, library_path, arch, dump)
        _patch_torch(stack, session)
        yield session
        if session.failure is not None:
            raise session.failure


def _set_environment(stack: contextlib.ExitStack, library: Path, arch: str, dump: str) -> None:
    stock = os.environ.get("CUTE_DSL_LIBS", "")
    wanted = {
        "CUTE_DSL_LIBS": f"{library}:{stock}" if stock else str(library),
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": dump,
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    for name, value in wanted.items():
        stack.callback(_restore_env, name, os.environ.get(name))
        os.environ[name] = value


def _restore_env(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    missing = object()
    old = owner.__dict__.get(name, missing)
    setattr(owner, name, value)
    if old is missing:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, old)


def _patch_dsl(
    stack: contextlib.ExitStack, session: Session, library: Path, arch: str, dump: str
) -> None:
    from cutlass.base_dsl.jit_executor import JitExecutor, JitFunctionArtifacts
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    read_artifacts = JitFunctionArtifacts.__post_init__

    def remember(self: Any) -> None:
        read_artifacts(self)
        if isinstance(self.CUBIN, bytes) and isinstance(self.PTX, str):
            session.register(self.CUBIN, self.PTX)

    _patch(stack, JitFunctionArtifacts, "__post_init__", remember)
    run = JitExecutor.run_compiled_program
    _patch(stack, JitExecutor, "run_compiled_program", _reporting(session, run))
    _patch(stack, CudaDialectJitCompiledFunction, "num_devices", 1)
    # Some packages load what this names with global symbols, which would then win over ours.
    import cutlass.cute.runtime as cute_runtime

    _patch(stack, cute_runtime, "find_runtime_libraries", lambda *args, **kwargs: [str(library)])
    convert = cute_runtime._Tensor.__init__

    def convert_known(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        convert(self, _pretend(session, tensor), *args, **kwargs)

    _patch(stack, cute_runtime._Tensor, "__init__", convert_known)
    environment = CuTeDSL._get_dsl().envar
    for name, value in (
        ("shared_libs", os.environ["CUTE_DSL_LIBS"]),
        ("arch", arch),
        ("dump_dir", dump),
        # Read from the environment at the DSL's first import, which may lie behind.
        ("keep_ptx", True),
        ("keep_cubin", True),
    ):
        _patch(stack, environment, name, value)
    _patch_tvm_ffi(stack, session)


def _reporting(session: Session, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, raising the failure of a launch inside it instead of the error made from its code."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception:
            if session.failure is None:
                raise
        failure, session.failure = session.failure, None
        raise failure

    return wrapped


def _pretend(session: Session, value: Any) -> Any:
    """CPU tensors among `value` as device tensors, their memory known to the session."""
    if is_cpu_tensor(value):
        session.tensors.add(value)
        return as_cuda_dlpack(value)
    if isinstance(value, (tuple, list)):
        items = [_pretend(session, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _patch_tvm_ffi(stack: contextlib.ExitStack, session: Session) -> None:
    try:
        import tvm_ffi
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        return  # the plain path needs none of this

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return call(
                self,
                *(_pretend(session, a) for a in args),
                **{k: _pretend(session, v) for k, v in kwargs.items()},
            )

        return _reporting(session, wrapped)

    for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
        owner = getattr(provider, name)
        _patch(stack, owner, "__call__", wrap(owner.__call__))
    from_dlpack = tvm_ffi.from_dlpack
    _patch(
        stack,
        tvm_ffi,
        "from_dlpack",
        lambda value, *a, **k: from_dlpack(_pretend(session, value), *a, **k),
    )


class _Device:
    """The few facts that host code asks of a device; the part is a B200 or an H200."""

    multi_processor_count = 148
    name = "ptxsim"
    major, minor = 10, 0


def _patch_torch(stack: contextlib.ExitStack, session: Session) -> None:
    try:
        import torch
    except ImportError:
        return
    cuda = torch.cuda
    _patch(stack, cuda, "is_available", lambda: True)
    _patch(stack, cuda, "get_device_capability", lambda device=None: (10, 0))
    _patch(stack, cuda, "get_device_properties", lambda device=None: _Device)
    _patch(stack, cuda, "current_device", lambda: 0)
    _patch(stack, torch.Tensor, "is_cuda", property(lambda self: True))
