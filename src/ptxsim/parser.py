"""PTX text to `ptx.PtxModule`.  PTX ISA chapters 4 (syntax) and 5 (state spaces, types).

Handles what NVVM and Triton emit: one pass over the tokens, scopes opened by inline assembly with
their own registers and repeated labels, debug sections skipped.
"""

from __future__ import annotations

import re

from ptxsim.errors import ParseError
from ptxsim.ptx import (
    TYPE_BYTES,
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Negated,
    Operand,
    Parameter,
    Pipe,
    PtxModule,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ptxsim.tokens import Tokens, locations, parse_number

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo"
    r"|globaltimer_hi|cluster_ctarank|cluster_nctarank|is_explicit_cluster|lanemask_\w+"
    r"|dynamic_smem_size|total_smem_size|aggr_smem_size|envreg\d+)$"
)
_SPACES = ("shared", "global", "const", "local")


def parse(text: str) -> PtxModule:
    """Parse a whole file."""
    return _Parser(text).module()


class _Parser(Tokens):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines = text.split("\n")
        self.locations = locations(text)
        self.kernel = Kernel("")
        self.scope_names: list[dict[str, Register]] = []
        self.scope_ids: list[int] = []

    # Module level.
    def module(self) -> PtxModule:
        out = PtxModule(locations=self.locations, lines=self.lines)
        while self.tokens[self.at][0] != "end":
            word = self.next()
            if word == ".version":
                out.version = self.next()
            elif word == ".target":
                out.target = self.next()
                while self.accept(","):
                    self.next()
            elif word == ".address_size":
                if self.integer() != 64:
                    raise ParseError("only 64-bit addresses are supported", line=self.line)
            elif word in (".visible", ".weak", ".extern"):
                continue
            elif word == ".entry":
                kernel = self._entry()
                out.kernels[kernel.name] = kernel
            elif word == ".func":
                self._skip_function()
            elif word.lstrip(".").split(".")[0] in _SPACES:
                extern = self.tokens[self.at - 2][1] == ".extern"
                out.variables.append(self._variable(word, extern))
            elif word == ".file":
                self._skip_file()
            elif word == ".section":
                self._skip_section()
            elif word in (";", ".pragma"):
                continue
            elif self.tokens[self.at - 1][0] != "str":
                raise ParseError(f"unexpected {word!r} at module level", line=self.line)
        return out

    def _skip_file(self) -> None:
        line = self.line
        while self.line == line and self.tokens[self.at][0] != "end":
            self.at += 1

    def _skip_section(self) -> None:
        while self.next() != "{":
            pass
        self._skip_braces()

    def _skip_braces(self) -> None:
        depth = 1
        while depth:
            token = self.next()
            depth += (token == "{") - (token == "}")

    def _skip_function(self) -> None:
        # A call stops the decoder with its line; a body nobody calls is of no interest.
        while self.token not in (";", "{"):
            self.at += 1
        if self.next() == "{":
            self._skip_braces()

    def _variable(self, space: str, extern: bool) -> Variable:
        align, size_of = 0, 0
        words = space.lstrip(".").split(".")
        space_name = words[0].split("::")[0]
        for word in words[1:]:
            size_of = TYPE_BYTES.get(word, size_of)
        while self.token.startswith("."):
            word = self.next()
            if word.startswith(".align"):
                align = self.integer()
                continue
            for part in word.lstrip(".").split("."):
                if part in TYPE_BYTES:
                    size_of = TYPE_BYTES[part]
                elif part not in ("attribute", "managed"):
                    raise ParseError(f"unknown attribute .{part} of a variable", line=self.line)
        name, count, open_ended = self.next(), 1, False
        while self.accept("["):
            if self.accept("]"):
                open_ended = True
                continue
            count *= self.integer()
            self.expect("]")
        data = self._initialiser(size_of, count) if self.accept("=") else None
        self.expect(";")
        size = size_of * count
        if open_ended:
            size = 0 if data is None else len(data)
        return Variable(name, space_name, size, align or size_of, data, extern or size == 0)

    def _initialiser(self, size_of: int, count: int) -> bytes:
        values: list[int] = []
        braces = self.accept("{")
        while True:
            values.append(self.integer() & ((1 << (8 * size_of)) - 1))
            if not self.accept(","):
                break
        if braces:
            self.expect("}")
        data = b"".join(v.to_bytes(size_of, "little") for v in values)
        return data.ljust(size_of * count, b"\0")

    def _entry(self) -> Kernel:
        self.kernel = kernel = Kernel(self.next())
        if self.accept("("):
            while not self.accept(")"):
                kernel.params.append(self._parameter())
                self.accept(",")
        while self.token != "{":
            word = self.next()
            numbers = []
            while self.tokens[self.at][0] == "num":
                numbers.append(self.integer())
                self.accept(",")
            if word == ".reqntid":
                kernel.reqntid = tuple(numbers + [1] * (3 - len(numbers)))
            elif word == ".reqnctapercluster":
                kernel.reqcluster = tuple(numbers + [1] * (3 - len(numbers)))
            elif word not in (
                ".maxntid",
                ".minnctapersm",
                ".maxnctapersm",
                ".maxnreg",
                ".explicitcluster",
                ".maxclusterrank",
                ".noreturn",
                ".blocksareclusters",
            ):
                raise ParseError(f"unknown kernel directive {word!r}", line=self.line)
        self.scope_names, self.scope_ids = [], []
        self._body()
        return kernel

    def _parameter(self) -> Parameter:
        self.expect(".param")
        align, size, pointer, kind = 0, 0, False, "b8"
        while self.token.startswith("."):
            word = self.next().lstrip(".")
            if word == "align":
                align = max(align, self.integer()) if not pointer else align
            elif word == "ptr":
                pointer = True
                align = align or size
                while self.token.startswith(".") and self.token != ".align":
                    self.next()  # the space pointed to
                if self.accept(".align"):
                    self.integer()  # the alignment of what is pointed to
            elif word in TYPE_BYTES:
                size, kind = TYPE_BYTES[word], word
            else:
                raise ParseError(f"unknown parameter attribute .{word}", line=self.line)
        name, count = self.next(), 1
        if self.accept("["):
            count = self.integer()
            self.expect("]")
        return Parameter(name, size * count, align or size, kind, pointer)

    # Bodies.
    def _body(self) -> None:
        self.expect("{")
        self._open_scope()
        depth = 1
        while depth:
            if self.accept("{"):
                self._open_scope()
                depth += 1
            elif self.accept("}"):
                self.scope_names.pop()
                self.scope_ids.pop()
                depth -= 1
            else:
                self._statement()

    def _open_scope(self) -> None:
        parent = self.scope_ids[-1] if self.scope_ids else -1
        if parent >= 0 or len(self.kernel.scopes) == 1:
            new = len(self.kernel.scopes) if parent >= 0 else 0
            if parent >= 0:
                self.kernel.scopes.append(parent)
            self.scope_ids.append(new)
        self.scope_names.append({})

    def _statement(self) -> None:
        kind, word, line = self.tokens[self.at]
        scope = self.scope_ids[-1]
        if self.accept(";"):
            return
        if kind == "word" and self.tokens[self.at + 1][1] == ":":
            self.at += 2
            if self.accept(".branchtargets"):
                self.kernel.tables[scope, word] = self._names_until_semicolon()
            else:
                self.kernel.labels[scope, word] = len(self.kernel.code)
        elif word == ".reg":
            self.at += 1
            self._registers()
        elif word == ".pragma":
            while self.next() != ";":
                pass
        elif word.startswith(".") and word.lstrip(".").split(".")[0].split("::")[0] in _SPACES:
            self.at += 1
            self.kernel.variables.append(self._variable(word, False))
        elif word.startswith("."):
            raise ParseError(f"unknown directive {word!r}", line=line)
        else:
            self._instruction()

    def _names_until_semicolon(self) -> list[str]:
        names = [self.next()]
        while self.accept(","):
            names.append(self.next())
        self.expect(";")
        return names

    def _registers(self) -> None:
        kind = self.next().lstrip(".")
        if kind not in TYPE_BYTES:
            raise ParseError(f"unknown register type .{kind}", line=self.line)
        while True:
            name = self.next()
            names = [name]
            if self.accept("<"):
                names = [f"{name}{i}" for i in range(self.integer())]
                self.expect(">")
            for item in names:
                register = Register(item, kind, len(self.kernel.registers))
                self.kernel.registers.append(register)
                self.scope_names[-1][item] = register
            if not self.accept(","):
                break
        self.expect(";")

    def _instruction(self) -> None:
        line, guard, negated = self.line, None, False
        first = self.at
        if self.accept("@"):
            negated = self.accept("!")
            found = self._lookup(self.next())
            if not isinstance(found, Register):
                raise ParseError("a guard must be a predicate register", line=line)
            guard = found
        op, *mods = self.next().split(".")
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self._operand())
            if not self.accept(",") and self.token != ";":
                raise ParseError(f"expected ',' or ';', found {self.token!r}", line=self.line)
        text = " ".join(t[1] for t in self.tokens[first : self.at - 1])
        self.kernel.code.append(
            Instruction(
                line,
                re.sub(r" ?([\[\],{}|+]) ?", r"\1", text).replace(",", ", "),
                op,
                tuple(mods),
                tuple(operands),
                guard,
                negated,
                self.scope_ids[-1],
            )
        )

    def _lookup(self, name: str) -> Operand:
        for names in reversed(self.scope_names):
            if name in names:
                return names[name]
        if name == "_":
            return Sink()
        if name.startswith("%"):
            if _SPECIAL.match(name):
                return Special(name)
            raise ParseError(f"unknown register {name}", line=self.line)
        return Symbol(name, self.scope_ids[-1])

    def _operand(self) -> Operand:
        kind, token, line = self.tokens[self.at]
        self.at += 1
        first: Operand
        if token == "{":
            items = []
            while not self.accept("}"):
                items.append(self._operand())
                self.accept(",")
            return Vector(tuple(items))
        if token == "[":
            return self._memory()
        if token == "!":
            inner = self._operand()
            if not isinstance(inner, Register):
                raise ParseError("'!' needs a predicate register", line=line)
            return Negated(inner)
        if token == "-" and self.tokens[self.at][0] == "num":
            return parse_number("-" + self.next())
        if kind == "num":
            first = parse_number(token)
        elif kind == "word":
            first = self._lookup(token)
        else:
            raise ParseError(f"unexpected {token!r} in an operand", line=line)
        return Pipe(first, self._operand()) if self.accept("|") else first

    def _memory(self) -> Memory:
        base = self._operand()
        if not isinstance(base, (Register, Symbol, Immediate)):
            raise ParseError("an address must be a register, symbol or number", line=self.line)
        offset = 0
        while self.token in ("+", "-") or self.tokens[self.at][0] == "num":
            sign = -1 if self.accept("-") else 1
            self.accept("+")
            offset += sign * self.integer()
        more = []
        while self.accept(","):
            more.append(self._operand())
        self.expect("]")
        return Memory(base, offset, tuple(more))
