"""`python -m ptxsim`: run a kernel on described arguments, list instruction forms, lint a file.

A launch is described in JSON:

    {"grid": [4], "block": 128, "shared": 0, "cluster": 1, "seed": 0, "kernel": "name",
     "args": [{"dtype": "float32", "shape": [1000], "fill": "normal"},
              {"dtype": "bfloat16", "shape": [1000], "fill": 0, "save": "out.npy"},
              {"file": "x.npy"}, {"bytes": "00ff"}, 1000, 0.5]}

Fills are a number, "normal", "uniform", "arange" or "nan"; the random ones depend on the seed.
bfloat16 arrays are saved as their 16-bit words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptxsim import lint
from ptxsim.errors import LaunchError, ParseError, SimulationError, UnsupportedInstruction
from ptxsim.isa.rounding import to_bf16_bits
from ptxsim.module import Module, load
from ptxsim.trace import Tracer

LAUNCH_KEYS = (
    *("grid", "block", "cluster", "shared", "seed", "strict", "races", "processes"),
    *("kernel", "args"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 fine, 1 found something, 2 usage."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ParseError as error:
        return _fail(f"{args.file}: {error}")
    except (OSError, KeyError, ValueError, LaunchError) as error:
        _fail(str(error.args[0]) if isinstance(error, KeyError) else str(error))
        return 2


def _fail(message: str) -> int:
    sys.stderr.write(f"ptxsim: {message}\n")
    return 1


def _say(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptxsim", description="Execute PTX on a CPU: function, not time."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one launch described by a JSON file")
    run.add_argument("file", type=Path)
    run.add_argument("--args", type=Path, required=True, help="JSON of the launch (see the docs)")
    run.add_argument("--seed", type=int, help="schedule seed, instead of the JSON's")
    run.add_argument("--strict", action="store_true", help="strict warnings are errors")
    run.add_argument("--races", action="store_true", help="look for data races")
    run.add_argument("--trace", type=int, default=20, help="instructions shown before a failure")
    run.set_defaults(run=_run)
    ops = commands.add_parser("ops", help="list the instruction forms and which cannot run")
    check = commands.add_parser("lint", help="what cannot run, and what looks wrong")
    for command, function in ((ops, _ops), (check, _lint)):
        command.add_argument("file", type=Path)
        command.add_argument("--kernel", help="one kernel of several")
        command.set_defaults(run=function)
    return parser


def _ops(args: argparse.Namespace) -> int:
    module = load(args.file)
    found = module.survey(args.kernel)
    missing = [form for form in found if form.reasons]
    for form in found:
        _say(f"{form.count:7}  {form.name}{'    UNSUPPORTED' if form.reasons else ''}")
    _say(f"{len(found)} forms, {sum(f.count for f in found)} instructions")
    if not missing:
        _say("all supported")
        return 0
    _say(f"{len(missing)} forms cannot run:")
    for form in missing:
        lines = ", ".join(str(e.line) for e in form.reasons[:8])
        more = ", ..." if len(form.reasons) > 8 else ""
        _say(f"  {form.reasons[0].message} (lines {lines}{more})")
    return 1


def _lint(args: argparse.Namespace) -> int:
    module = load(args.file)
    errors = module.unsupported(args.kernel)
    for error in errors:
        _say(f"{args.file}:{error.line}: error: {error.message}\n    {error.text}")
    if errors:
        return 1
    names = [args.kernel] if args.kernel else module.kernels
    for name in names:
        for note in lint.notes(module.program(name)):
            _say(f"{args.file}:{note.line}: note: {note.message}")
    return 0


def _run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    module = load(args.file)
    values = [_argument(a, plan["seed"] + n) for n, a in enumerate(plan["args"])]
    options = {k: v for k, v in plan.items() if k not in ("grid", "block", "args")}
    try:
        result = module.launch(plan["grid"], plan["block"], values, **options)
    except SimulationError as error:
        if isinstance(error, LaunchError):
            raise
        _report(args, module, plan, error)
        return 1
    _say(f"{result.steps} warp instructions, simulated")
    for warning in result.warnings:
        _say(f"warning: {warning}")
    for number, (spec, value) in enumerate(zip(plan["args"], values, strict=True)):
        if isinstance(value, np.ndarray):
            _say(f"args[{number}]: {_summary(spec, value)}")
            if isinstance(spec, dict) and "save" in spec:
                np.save(spec["save"], value)
    return 0


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    plan = json.loads(args.args.read_text())
    if not isinstance(plan, dict):
        raise ValueError(f"{args.args}: a JSON object is needed")
    unknown = sorted(set(plan) - set(LAUNCH_KEYS))
    if unknown:
        raise ValueError(f"{args.args}: unknown keys {unknown}; known are {list(LAUNCH_KEYS)}")
    for key in ("grid", "block", "args"):
        if key not in plan:
            raise ValueError(f"{args.args}: {key!r} is missing")
    plan.setdefault("seed", 0)
    if args.seed is not None:
        plan["seed"] = args.seed
    plan |= {name: True for name in ("strict", "races") if getattr(args, name)}
    return plan


def _argument(spec: Any, seed: int) -> Any:
    """A kernel argument from its description."""
    if isinstance(spec, bool) or not isinstance(spec, dict):
        if not isinstance(spec, (int, float)):
            raise ValueError(f"argument {spec!r}: a number or an object is needed")
        return spec
    unknown = sorted(set(spec) - {"dtype", "shape", "fill", "file", "bytes", "save"})
    if unknown:
        raise ValueError(f"argument with unknown keys {unknown}")
    if "bytes" in spec:
        return bytes.fromhex(spec["bytes"])
    if "file" in spec:
        return np.ascontiguousarray(np.load(spec["file"]))
    return _filled(spec.get("dtype", "float32"), spec["shape"], spec.get("fill", 0), seed)


def _filled(dtype: str, shape: Any, fill: Any, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    count = int(np.prod(shape))
    numbers = {
        "normal": lambda: random.standard_normal(count),
        "uniform": lambda: random.random(count),
        "arange": lambda: np.arange(count, dtype=np.float64),
        "nan": lambda: np.full(count, np.nan),
    }
    if isinstance(fill, str) and fill not in numbers:
        raise ValueError(f"fill {fill!r}: a number or one of {sorted(numbers)}")
    values = numbers[fill]() if isinstance(fill, str) else np.full(count, fill)
    if dtype == "bfloat16":
        return np.asarray(to_bf16_bits(values.astype(np.float32))).reshape(shape)
    return values.astype(np.dtype(dtype)).reshape(shape)


def _summary(spec: Any, value: np.ndarray) -> str:
    name = spec.get("dtype", str(value.dtype)) if isinstance(spec, dict) else str(value.dtype)
    numbers = value
    if name == "bfloat16":
        numbers = (value.astype(np.uint32) << 16).view(np.float32)
    if not numbers.size:
        return f"{name}{list(value.shape)}, empty"
    wide = numbers.astype(np.float64)
    nans = int(np.isnan(wide).sum())
    if nans == wide.size:
        return f"{name}{list(value.shape)}, all NaN"
    text = f"min {np.nanmin(wide):.6g}, mean {np.nanmean(wide):.6g}, max {np.nanmax(wide):.6g}"
    return f"{name}{list(value.shape)}, {text}, {nans} NaN"


def _report(
    args: argparse.Namespace, module: Module, plan: dict[str, Any], error: SimulationError
) -> None:
    """The error, and the last instructions of the warp that met it."""
    _say(f"{type(error).__name__}: {error}")
    if error.source:
        _say(f"    from {error.source}")
    if error.warp is None or error.cta is None or isinstance(error, UnsupportedInstruction):
        return
    name = module.ptx.entry(plan.get("kernel")).name
    tracer = Tracer(module.program(name), error.cta, error.warp, args.trace)
    values = [_argument(a, plan["seed"] + n) for n, a in enumerate(plan["args"])]
    options = {k: v for k, v in plan.items() if k not in ("grid", "block", "args")}
    module.use(tracer.program)
    try:
        module.launch(plan["grid"], plan["block"], values, **options)
    except SimulationError:
        _say(f"the last instructions of warp {error.warp} of CTA {error.cta}:")
        for row in tracer.rows:
            _say(str(row))
