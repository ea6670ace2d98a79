"""PTX text to tokens, literals to numbers, `.loc` lines to source positions."""

from __future__ import annotations

import re
import struct

from ptxsim.errors import ParseError
from ptxsim.ptx import Immediate

_TOKEN = re.compile(
    r"""(?P<ws>[ \t\r]+)|(?P<nl>\n)|(?P<str>"[^"\n]*")
    |(?P<num>-?0[fF][0-9a-fA-F]{8}|-?0[dD][0-9a-fA-F]{16}|-?0[xX][0-9a-fA-F]+U?
        |-?0[bB][01]+U?|-?\d+(?:\.\d+(?:[eE][-+]?\d+)?)?U?)
    |(?P<word>\.?[A-Za-z_$%][\w$]*(?:(?:::|\.)\w+)*)
    |(?P<punct>[{}()\[\],;:@!|+=<>-])""",
    re.X,
)
_LOC = re.compile(r"^[ \t]*\.loc[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\d+).*$", re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def parse_number(token: str) -> Immediate:
    """A literal: integer, `0f…` or `0d…`."""
    body = token.removeprefix("-")
    if body[:2] in ("0f", "0F"):
        return Immediate(int(body[2:], 16), "f32")
    if body[:2] in ("0d", "0D"):
        return Immediate(int(body[2:], 16), "f64")
    if "." in body:
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(token)))[0], "f64")
    digits = body.removesuffix("U")
    base = {"0x": 16, "0b": 2}.get(digits[:2].lower(), 8 if digits[0] == "0" else 10)
    value = int(digits, base)
    return Immediate(-value if token[0] == "-" else value)


class Tokens:
    """The tokens of a file and the place that the parser has come to.

    A token is its kind ("num", "word", "str", "punct", at last "end"), its text and its line.
    Comments and `.loc` lines leave none.
    """

    def __init__(self, text: str) -> None:
        text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.tokens = _tokenise(_LOC.sub("", text))
        self.at = 0

    @property
    def token(self) -> str:
        if self.at >= len(self.tokens):
            raise ParseError("the file ends inside a statement", line=self.tokens[-1][2])
        return self.tokens[self.at][1]

    @property
    def line(self) -> int:
        return self.tokens[self.at][2]

    def next(self) -> str:
        value = self.token
        self.at += 1
        return value

    def accept(self, value: str) -> bool:
        if self.token == value and self.tokens[self.at][0] != "str":
            self.at += 1
            return True
        return False

    def expect(self, value: str) -> None:
        if not self.accept(value):
            raise ParseError(f"expected {value!r}, found {self.token!r}", line=self.line)

    def integer(self) -> int:
        kind, value, line = self.tokens[self.at]
        if kind != "num":
            raise ParseError(f"expected a number, found {value!r}", line=line)
        self.at += 1
        return parse_number(value).bits


def _tokenise(text: str) -> list[tuple[str, str, int]]:
    tokens = []
    line, position = 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"unexpected character {text[position]!r}", line=line)
        kind = match.lastgroup or ""
        if kind == "nl":
            line += 1
        elif kind != "ws":
            tokens.append((kind, match[0], line))
        position = match.end()
    tokens.append(("end", "", line))
    return tokens


def locations(text: str) -> dict[int, str]:
    """Line of each `.loc` to `file:line:column`; readers take the last one at or before a line."""
    if ".loc" not in text:
        return {}
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
    found = {}
    for number, row in enumerate(text.split("\n"), start=1):
        match = _LOC.match(row)
        if match:
            found[number] = f"{files.get(match[1], match[1])}:{match[2]}:{match[3]}"
    return found
