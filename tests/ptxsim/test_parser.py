"""PTX text to its parsed form.  PTX ISA: Syntax; State Spaces, Types, and Variables; Directives."""

from __future__ import annotations

import struct

import pytest

import ptxsim
from ptxsim.parser import parse
from ptxsim.ptx import Immediate, Memory, Negated, Pipe, Register, Sink, Symbol, Vector
from ptxsim.tokens import parse_number

HEAD = ".version 9.0\n.target sm_100a, debug\n.address_size 64\n"


def body(text: str, registers: str = ".reg .b32 %r<8>; .reg .b64 %q<4>; .reg .pred %p<3>;"):
    """The parsed kernel around some statements."""
    return parse(f"{HEAD}.visible .entry k()\n{{\n{registers}\n{text}\n}}\n").entry("k")


@pytest.mark.parametrize(
    ("text", "bits", "kind"),
    [
        ("12", 12, "int"),
        ("-3", -3, "int"),
        ("0x1F", 31, "int"),
        ("0XffU", 255, "int"),
        ("017", 15, "int"),
        ("0b101", 5, "int"),
        ("7U", 7, "int"),
        ("0f3F800000", 0x3F800000, "f32"),
        ("0FBF800000", 0xBF800000, "f32"),
        ("0d3FF0000000000000", 0x3FF0000000000000, "f64"),
        ("1.5", struct.unpack("<Q", struct.pack("<d", 1.5))[0], "f64"),
        ("1.5e3", struct.unpack("<Q", struct.pack("<d", 1500.0))[0], "f64"),
    ],
)
def test_literals(text: str, bits: int, kind: str) -> None:
    assert parse_number(text) == Immediate(bits, kind)
    (ins,) = body(f"mov.b64 %q0, {text};").code
    assert ins.operands[1] == Immediate(bits, kind)


def test_operands() -> None:
    code = body(
        """
        setp.lt.and.s32 %p0|%p1, %r0, -1, !%p2;
        ld.global.v2.b32 {%r0, _}, [%q0+16];
        st.shared.b32 [%r1+-4], %r0;
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%r0], [%q0, {%r1, %r2}], [%r3];
        mov.u32 %r0, %tid.x;
        mov.b64 %q0, {%r0, %r1};
        """
    ).code
    setp, load, store, copy, special, pack = code
    assert setp.form == "setp.lt.and.s32"
    assert isinstance(setp.operands[0], Pipe)
    assert isinstance(setp.operands[3], Negated)
    assert isinstance(load.operands[0], Vector)
    assert isinstance(load.operands[0].items[1], Sink)
    assert isinstance(load.operands[1], Memory)
    assert load.operands[1].offset == 16
    assert isinstance(store.operands[0], Memory)
    assert store.operands[0].offset == -4
    assert isinstance(copy.operands[1], Memory)
    assert [o.name for o in copy.operands[1].more[0].items] == ["%r1", "%r2"]
    assert copy.mods[-1] == "mbarrier::complete_tx::bytes"
    assert special.operands[1].name == "%tid.x"
    assert [o.name for o in pack.operands[1].items] == ["%r0", "%r1"]


def test_guards() -> None:
    plain, guarded, negated = body("exit; @%p1 exit; @!%p2 bra L;\nL:").code
    assert plain.guard is None
    assert (guarded.guard.name, guarded.guard_negated) == ("%p1", False)
    assert (negated.guard.name, negated.guard_negated) == ("%p2", True)
    with pytest.raises(ptxsim.ParseError, match="predicate"):
        body("@7 exit;")


def test_scopes_have_registers_and_labels_of_their_own() -> None:
    """What inline assembly makes of itself: the same names again and again."""
    kernel = body(
        """
        { .reg .pred %done; LOOP: setp.eq.u32 %done, %r0, 1; @%done bra LOOP; }
        { .reg .pred %done; LOOP: setp.eq.u32 %done, %r1, 2; @%done bra LOOP; bra OUT; }
        OUT: exit;
        """
    )
    code = kernel.code
    first, second = code[0].operands[0], code[2].operands[0]
    assert first.name == second.name == "%done"
    assert first.slot != second.slot
    targets = [
        kernel.label(ins.operands[0].name, ins.operands[0].scope) for ins in code if ins.op == "bra"
    ]
    assert targets == [0, 2, 5]
    assert kernel.label("LOOP", 0) is None


def test_directives_of_a_kernel() -> None:
    module = parse(
        HEAD
        + """
        .visible .entry first(.param .u64 .ptr .global .align 16 x, .param .align 64 .b8 map[128],
            .param .f32 s)
        .reqntid 128, 2
        .minnctapersm 1
        .explicitcluster
        .reqnctapercluster 2
        { ret; }
        .entry second() .maxntid 256, 1, 1 .maxnreg 64 { .pragma "nounroll"; ret; }
        """
    )
    first = module.entry("first")
    assert first.reqntid == (128, 2, 1)
    assert first.reqcluster == (2, 1, 1)
    assert [(p.name, p.size, p.align, p.pointer) for p in first.params] == [
        ("x", 8, 8, True),
        ("map", 128, 64, False),
        ("s", 4, 4, False),
    ]
    assert module.version == "9.0"
    assert module.target == "sm_100a"
    with pytest.raises(KeyError, match="2 kernels"):
        module.entry()
    with pytest.raises(KeyError, match="no kernel 'third'"):
        module.entry("third")


def test_variables_and_initialisers() -> None:
    module = parse(
        HEAD
        + """
        .extern .shared .align 1024 .b8 dynamic[];
        .global .align 4 .b32 table[4] = {1, 2, -1};
        .const .b8 text[] = {65, 66, 0};
        .shared .align 8 .b64 bar[2];
        .visible .entry k() { .local .align 16 .b8 stack[32]; .shared .b32 x; ret; }
        """
    )
    found = {v.name: v for v in module.variables}
    assert (found["dynamic"].size, found["dynamic"].align, found["dynamic"].extern) == (
        0,
        1024,
        True,
    )
    assert found["table"].data == struct.pack("<3i", 1, 2, -1) + bytes(4)
    assert found["text"].data == b"AB\0"
    assert found["text"].size == 3
    assert (found["bar"].size, found["bar"].align) == (16, 8)
    kernel = module.entry("k")
    assert [(v.name, v.space, v.size, v.align) for v in kernel.variables] == [
        ("stack", "local", 32, 16),
        ("x", "shared", 4, 4),
    ]


def test_comments_debug_information_and_positions() -> None:
    module = parse(
        HEAD
        + """.file 1 "/somewhere/kernel.py"
/* a comment
   of two lines */
.visible .entry k() {
.loc 1 23 5
// begin inline asm
exit; // the end

.loc 1 31 9, function_name $L__info, inlined_at 1 40 3
exit;
}
.section .debug_str { .b8 1, 2, 3 { } }
.func (.param .b32 r) helper(.param .b32 a) { ret; }
"""
    )
    first, second = module.entry("k").code
    lines = module.lines
    assert lines[first.line - 1] == "exit; // the end"
    assert lines[second.line - 1] == "exit;"
    assert module.locations[first.line - 2] == "/somewhere/kernel.py:23:5"
    assert module.locations[second.line - 1] == "/somewhere/kernel.py:31:9"


def test_branch_tables() -> None:
    kernel = body("TABLE: .branchtargets A, B, A;\nbrx.idx %r0, TABLE;\nA: exit;\nB: exit;")
    assert kernel.table("TABLE", 0) == ["A", "B", "A"]
    assert isinstance(kernel.code[0].operands[1], Symbol)


def test_registers_of_all_declarations() -> None:
    kernel = body("", ".reg .b32 %r<3>, %x; .reg .f64 y; .reg .pred p, q; .reg .b128 %w;")
    names = [r.name for r in kernel.registers]
    assert names == ["%r0", "%r1", "%r2", "%x", "y", "p", "q", "%w"]
    assert [r.width for r in kernel.registers] == [32, 32, 32, 32, 64, 1, 1, 128]
    assert isinstance(body("mov.f64 y, y;", ".reg .f64 y;").code[0].operands[0], Register)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("mov.u32 %r0, %r1\nexit;", "expected ',' or ';'", 8),
        ("mov.u32 %nope, 1;", "unknown register %nope", 7),
        (".frob 3;", "unknown directive '.frob'", 7),
        (".reg .q32 %z;", "unknown register type", 7),
        ("mov.u32 %r0, ?;", "unexpected character '?'", 7),
    ],
)
def test_errors_name_the_line(text: str, message: str, line: int) -> None:
    with pytest.raises(ptxsim.ParseError, match=message.replace("?", r"\?")) as caught:
        body(text)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 9.0\n.target sm_90\n.address_size 32\n", "64-bit addresses"),
        (HEAD + ".entry k() .frob 1 { ret; }", "unknown kernel directive"),
        (HEAD + ".entry k(.param .q64 x) { ret; }", "unknown parameter attribute"),
        (HEAD + "frob;", "unexpected 'frob' at module level"),
        (HEAD + ".visible .entry k() { ret;", "ends inside"),
    ],
)
def test_errors_of_a_module(text: str, message: str) -> None:
    with pytest.raises(ptxsim.ParseError, match=message):
        parse(text)


def test_an_unknown_label_or_symbol_is_an_error_of_its_line() -> None:
    text = f"{HEAD}.visible .entry k()\n{{\n.reg .b32 %r;\nbra NOWHERE;\n}}\n"
    with pytest.raises(ptxsim.UnsupportedInstruction, match="no label") as caught:
        ptxsim.load(text).launch(1, 32, [])
    assert caught.value.line == 7
    text = text.replace("bra NOWHERE", "mov.u32 %r, nothing")
    with pytest.raises(ptxsim.UnsupportedInstruction, match="unknown symbol nothing"):
        ptxsim.load(text).launch(1, 32, [])


def test_a_call_is_an_error() -> None:
    text = f"{HEAD}.func f() {{ ret; }}\n.visible .entry k()\n{{\ncall f;\n}}\n"
    with pytest.raises(ptxsim.UnsupportedInstruction, match="call") as caught:
        ptxsim.load(text).launch(1, 32, [])
    assert caught.value.line == 7
