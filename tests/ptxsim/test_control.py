"""Branches, loops, exits and guards: lanes that go their own ways keep their own registers.

Random structured programs (with breaks, continues and early exits) run in the simulator and, lane
by lane, in a small interpreter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import harness
import numpy as np
import pytest

import ptxsim

TOP = 0xFFFFFFFF
VARIABLES = 4
OPERATIONS = {
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "xor.b32": lambda a, b: a ^ b,
    "min.u32": min,
}
COMPARISONS = {
    "lt.u32": lambda a, b: a < b,
    "ge.u32": lambda a, b: a >= b,
    "eq.u32": lambda a, b: a == b,
    "ne.u32": lambda a, b: a != b,
}


class Break(Exception):
    """Leaves the innermost loop."""


class Continue(Exception):
    """Begins the innermost loop's next turn."""


class Exit(Exception):
    """Ends the thread."""


@dataclass
class Program:
    """Statements as nested tuples, made at random; both sides below read the same ones."""

    rng: random.Random
    labels: int = 0
    counters: int = 0
    lines: list[str] = field(default_factory=list)

    # Making programs.
    def block(self, depth: int, in_loop: bool) -> list[tuple]:
        return [self.statement(depth, in_loop) for _ in range(self.rng.randint(1, 4))]

    def statement(self, depth: int, in_loop: bool) -> tuple:
        rng = self.rng
        kinds = ["set", "set", "set", "guarded"]
        if depth:
            kinds += ["if", "if", "loop"]
        if in_loop:
            kinds += ["break", "continue"]
        if depth < 3:
            kinds.append("exit") if rng.random() < 0.15 else None
        kind = rng.choice(kinds)
        d, a = rng.randrange(VARIABLES), rng.randrange(VARIABLES)
        b = rng.randrange(VARIABLES) if rng.random() < 0.5 else -rng.randint(1, 9)
        condition = (rng.choice(list(COMPARISONS)), a, b)
        if kind in ("set", "guarded"):
            change = ("set", rng.choice(list(OPERATIONS)), d, rng.randrange(VARIABLES), b)
            return change if kind == "set" else ("guarded", condition, rng.random() < 0.5, change)
        if kind == "if":
            other = self.block(depth - 1, in_loop) if rng.random() < 0.6 else []
            return ("if", condition, self.block(depth - 1, in_loop), other)
        if kind == "loop":
            self.counters += 1
            # How often depends on the lane: the low bits of a variable.
            return ("loop", self.counters - 1, a, rng.randint(1, 5), self.block(depth - 1, True))
        return (kind, condition)

    # Their PTX.
    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def operand(self, b: int) -> str:
        return f"%v{b}" if b >= 0 else str(-b)

    def test(self, condition: tuple) -> str:
        name, a, b = condition
        self.lines.append(f"setp.{name} %p, %v{a}, {self.operand(b)};")
        return "%p"

    def emit(self, block: list[tuple], loop: tuple[str, str] | None = None) -> None:
        for statement in block:
            self.emit_one(statement, loop)

    def emit_one(self, s: tuple, loop: tuple[str, str] | None) -> None:
        out = self.lines.append
        if s[0] == "set":
            out(f"{s[1]} %v{s[2]}, %v{s[3]}, {self.operand(s[4])};")
        elif s[0] == "guarded":
            self.test(s[1])
            change = s[3]
            sign = "!" if s[2] else ""
            out(f"@{sign}%p {change[1]} %v{change[2]}, %v{change[3]}, {self.operand(change[4])};")
        elif s[0] == "if":
            other, end = self.label(), self.label()
            self.test(s[1])
            out(f"@!%p bra {other};")
            self.emit(s[2], loop)
            out(f"bra {end};\n{other}:")
            self.emit(s[3], loop)
            out(f"{end}:")
        elif s[0] == "loop":
            head, end = self.label(), self.label()
            out(f"and.b32 %n{s[1]}, %v{s[2]}, 3; add.u32 %n{s[1]}, %n{s[1]}, {s[3]};\n{head}:")
            out(f"setp.eq.u32 %p, %n{s[1]}, 0;\n@%p bra {end};")
            out(f"sub.u32 %n{s[1]}, %n{s[1]}, 1;")
            self.emit(s[4], (head, end))
            out(f"bra {head};\n{end}:")
        else:
            self.test(s[1])
            if s[0] == "exit":
                out("@%p ret;")
            else:
                assert loop is not None
                out(f"@%p bra {loop[1] if s[0] == 'break' else loop[0]};")

    # Their meaning.
    def run(self, block: list[tuple], v: list[int]) -> None:
        for s in block:
            if s[0] == "set":
                self.assign(s, v)
            elif s[0] == "guarded":
                if self.holds(s[1], v) != s[2]:
                    self.assign(s[3], v)
            elif s[0] == "if":
                self.run(s[2] if self.holds(s[1], v) else s[3], v)
            elif s[0] == "loop":
                self.run_loop(s, v)
            elif self.holds(s[1], v):
                raise {"break": Break, "continue": Continue, "exit": Exit}[s[0]]

    def run_loop(self, s: tuple, v: list[int]) -> None:
        for _ in range((v[s[2]] & 3) + s[3]):
            try:
                self.run(s[4], v)
            except Break:
                return
            except Continue:
                continue

    def holds(self, condition: tuple, v: list[int]) -> bool:
        name, a, b = condition
        return COMPARISONS[name](v[a], v[b] if b >= 0 else -b)

    def assign(self, s: tuple, v: list[int]) -> None:
        _, name, d, a, b = s
        v[d] = OPERATIONS[name](v[a], v[b] if b >= 0 else -b) & TOP


def kernel(program: Program, statements: list[tuple]) -> str:
    """Loads the variables, runs the program, stores them; threads that exit store nothing."""
    program.lines = []
    program.emit(statements)
    loads = "\n".join(f"ld.global.b32 %v{n}, [%q+{128 * n}];" for n in range(VARIABLES))
    stores = "\n".join(f"st.global.b32 [%q+{128 * n}], %v{n};" for n in range(VARIABLES))
    body = (
        "mov.u32 %t, %tid.x; ld.param.u64 %q, [in]; mad.wide.u32 %q, %t, 4, %q;\n"
        f"{loads}\n" + "\n".join(program.lines) + "\nld.param.u64 %q, [out]; "
        f"mad.wide.u32 %q, %t, 4, %q;\n{stores}"
    )
    registers = f".reg .b32 %t, %v<{VARIABLES}>, %n<{max(1, program.counters)}>;"
    registers += ".reg .b64 %q; .reg .pred %p;"
    return harness.kernel(body, [".u64 in", ".u64 out"], registers)


@pytest.mark.parametrize("number", range(60))
def test_random_programs_do_what_each_lane_would_do_alone(number: int) -> None:
    program = Program(random.Random(number))
    statements = program.block(3, False)
    rng = np.random.default_rng(number)
    start = rng.integers(0, 12, (VARIABLES, 32)).astype(np.uint32)
    if number % 4 == 0:  # warp-uniform values: no lane leaves the others
        start[:] = start[:, :1]
    want = np.full((VARIABLES, 32), 0xDEAD, np.uint32)
    for lane in range(32):
        values = start[:, lane].tolist()
        try:
            program.run(statements, values)
        except Exit:
            continue
        want[:, lane] = values
    text = kernel(program, statements)
    for seed in (0, 1):
        out = np.full((VARIABLES, 32), 0xDEAD, np.uint32)
        ptxsim.load(text).launch(1, 32, [start, out], seed=seed)
        np.testing.assert_array_equal(out, want, err_msg=text)


def test_a_block_that_is_no_multiple_of_32() -> None:
    out = np.zeros(64, np.uint32)
    body = """
    mov.u32 %t, %tid.x; ld.param.u64 %q, [out]; mad.wide.u32 %q, %t, 4, %q;
    bar.sync 0;
    st.global.b32 [%q], 1;
    """
    text = harness.kernel(body, [".u64 out"], ".reg .b32 %t; .reg .b64 %q;")
    ptxsim.load(text).launch(1, 40, [out])
    assert out.sum() == 40


def test_indexed_branches() -> None:
    body = """
    TABLE: .branchtargets A, B, C;
    and.b32 %x, %a0, 3;
    min.u32 %x, %x, 2;
    brx.idx %x, TABLE;
    A: mov.u32 %d0, 10; bra END;
    B: mov.u32 %d0, 20; bra END;
    C: mov.u32 %d0, 30;
    END:
    """
    values = np.arange(64, dtype=np.uint32)
    for uniform in (False, True):
        (got,) = harness.run(body, [values], ["u4"], (uniform,))
        picked = np.minimum(harness.spread(values, uniform) & 3, 2)
        np.testing.assert_array_equal(got, (picked + 1) * 10)


def test_guards_keep_registers_of_every_width() -> None:
    body = """
    .reg .b16 %h; .reg .b32 %w; .reg .b64 %l; .reg .pred %k;
    setp.lt.u32 %act, %lane, 11;
    mov.b16 %h, 1; mov.b32 %w, 2; mov.b64 %l, 3; setp.ne.u32 %k, %lane, %lane;
    @%act mov.b16 %h, 0xFFFF;
    @%act mov.b32 %w, %a0;
    @%act mov.b64 %l, {%a0, %a0};
    @%act setp.eq.u32 %k, %lane, %lane;
    cvt.u32.u16 %d0, %h;
    mov.b32 %d1, %w;
    mov.b64 %d2, %l;
    selp.b32 %d3, 1, 0, %k;
    """
    values = np.arange(100, 132, dtype=np.uint32)
    for uniform in (False, True):
        h, w, wide, k = harness.run(body, [values], ["u4", "u4", "u8", "u4"], (uniform,))
        seen = harness.spread(values, uniform).astype(np.uint64)
        active = np.arange(32) < 11
        np.testing.assert_array_equal(h, np.where(active, 0xFFFF, 1))
        np.testing.assert_array_equal(w, np.where(active, seen, 2))
        np.testing.assert_array_equal(wide, np.where(active, seen | seen << 32, 3))
        np.testing.assert_array_equal(k, active)


def test_special_registers_of_a_grid() -> None:
    body = """
    mov.u32 %a, %ctaid.x; mov.u32 %b, %ctaid.y; mov.u32 %c, %nctaid.x;
    mad.lo.u32 %a, %b, %c, %a;
    mov.u32 %b, %tid.z; mov.u32 %c, %ntid.y; mad.lo.u32 %b, %b, %c, 0;
    mov.u32 %c, %tid.y; add.u32 %b, %b, %c; mov.u32 %c, %ntid.x; mov.u32 %d, %tid.x;
    mad.lo.u32 %b, %b, %c, %d;
    mad.lo.u32 %a, %a, 24, %b;
    ld.param.u64 %q, [out]; mad.wide.u32 %q, %a, 4, %q;
    st.global.b32 [%q], %a;
    """
    text = harness.kernel(body, [".u64 out"], ".reg .b32 %a, %b, %c, %d; .reg .b64 %q;")
    out = np.full(24 * 6, 0xDEAD, np.uint32)
    ptxsim.load(text).launch((3, 2), (4, 3, 2), [out])
    np.testing.assert_array_equal(out, np.arange(24 * 6))


def test_trap_stops_with_its_line() -> None:
    with pytest.raises(ptxsim.SimulationError, match="executed `trap`") as caught:
        harness.run("trap;\nmov.u32 %d0, 0;", [np.zeros(32, np.uint32)], ["u4"])
    assert caught.value.text == "trap"


def test_an_endless_loop_is_called_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptxsim import module

    real = module.Options
    monkeypatch.setattr(module, "Options", lambda **kw: real(**kw, max_steps=1000))
    with pytest.raises(ptxsim.Deadlock, match="livelock"):
        ptxsim.load(harness.kernel("AGAIN: bra AGAIN;")).launch(1, 32, [])
