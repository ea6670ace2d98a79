"""Record the launches of the corpus, to be repeated on a real Hopper GPU by replay.py.

    PTXSIM_RECORD=DIR python corpus/flash_attention.py --arch sm_90a --backward

Every launch that ends well is kept: its PTX assembled for sm_90a, its parameters, and all its
buffers before and after.  Launches that ptxas refuses for that chip are not.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptxsim import module as ptxsim_module
from ptxsim.module import Module, _extent, _pack, _shape

MOST_BYTES = 16 << 20  # of buffers; larger launches are not kept


class Recorder:
    """Wraps `Module.launch` and writes one file a launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.cubins: dict[str, bytes | None] = {}
        self.original: Callable[..., Any] = Module.launch

    def install(self) -> None:
        recorder = self

        def launch(self: Module, grid: Any, block: Any, args: Sequence[Any], **options: Any) -> Any:
            before = recorder.prepare(self, grid, block, args, options)
            result = recorder.original(self, grid, block, args, **options)
            if before is not None:
                recorder.keep(before)
            return result

        Module.launch = launch  # type: ignore[method-assign]

    def prepare(
        self, module: Module, grid: Any, block: Any, args: Sequence[Any], options: dict[str, Any]
    ) -> dict[str, Any] | None:
        """What the launch starts from; None if it cannot run on the chip."""
        cubin = self.cubin("\n".join(module.ptx.lines))
        if cubin is None:
            return None
        entry = module.ptx.entry(options.get("kernel"))
        extents = [_extent(m) for m in options.get("memory", ())]
        try:
            packed = _pack(module.program(entry.name), entry, args, extents)
        except ptxsim_module.LaunchError:
            return None
        buffers = {}
        for address, size in ptxsim_module.GlobalMemory(extents).regions_as_extents():
            buffers[address] = _read(address, size)
        if sum(map(len, buffers.values())) > MOST_BYTES:
            return None
        offsets = module.program(entry.name).decoder.param_offsets
        params = [
            packed[offsets[p.name] : offsets[p.name] + p.size].tobytes() for p in entry.params
        ]
        return {
            "name": " ".join(sys.argv), "cubin": cubin, "kernel": entry.name, "grid": _shape(grid),
            "block": _shape(block), "params": params, "before": buffers,
            "cluster": _shape(options.get("cluster") or entry.reqcluster or 1),
            "shared": options.get("shared", 0),
        }  # fmt: skip

    def keep(self, record: dict[str, Any]) -> None:
        """Add the buffers as the launch left them, and write the record."""
        record["after"] = {a: _read(a, len(data)) for a, data in record["before"].items()}
        data = pickle.dumps(record)
        name = hashlib.sha256(data).hexdigest()[:24]
        (self.folder / f"{name}.pickle").write_bytes(data)

    def cubin(self, ptx: str) -> bytes | None:
        """The text for sm_90a, or None if that chip or this assembler cannot."""
        text = re.sub(r"\.target\s+\S+", ".target sm_90a", ptx, count=1)
        text = re.sub(r"\.version\s+9\.\d", ".version 9.0", text, count=1)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self.cubins:
            with tempfile.TemporaryDirectory() as scratch:
                source, out = Path(scratch) / "k.ptx", Path(scratch) / "k.cubin"
                source.write_text(text)
                command = ["ptxas", "-arch=sm_90a", str(source), "-o", str(out)]
                done = subprocess.run(command, capture_output=True)
                self.cubins[key] = out.read_bytes() if done.returncode == 0 else None
        return self.cubins[key]


def _read(address: int, size: int) -> bytes:
    region = ptxsim_module.GlobalMemory([(address, size)])
    return region.bytes_at(address, size).tobytes() if size else np.zeros(0, np.uint8).tobytes()


def from_environment() -> None:
    """Record if PTXSIM_RECORD names a folder."""
    if os.environ.get("PTXSIM_RECORD"):
        Recorder(Path(os.environ["PTXSIM_RECORD"])).install()
