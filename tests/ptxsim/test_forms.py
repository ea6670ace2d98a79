"""The table of supported forms against the decoder, the documentation, and NVIDIA's assembler."""

from __future__ import annotations

import random
import re
from pathlib import Path

import assembler
import pytest

import ptxsim
from ptxsim import decode
from ptxsim.forms import CHAPTERS, Entry, expand, markdown, normal, sample

DOCUMENT = Path(__file__).parents[2] / "docs" / "ptxsim.md"
ENTRIES = [entry for _, entries in CHAPTERS for entry in entries]
LISTED: dict[str, Entry] = {form: entry for entry in ENTRIES for form in expand(entry.forms)}
NORMAL = {normal(form) for form in LISTED}
# Known to the decoder only to say why not.
REFUSED = {"mbarrier.pending_count"}
needs_assembler = pytest.mark.skipif(
    assembler.PTXAS is None, reason="ptxas, NVIDIA's assembler, is not installed"
)


def arch(entry: Entry) -> str:
    return entry.arch or "sm_100a"


@pytest.mark.parametrize(("title", "entries"), CHAPTERS, ids=[c[0].split(",")[0] for c in CHAPTERS])
def test_every_listed_form_decodes(title: str, entries: tuple[Entry, ...]) -> None:
    texts = [sample(form, entry.operands) for entry in entries for form in expand(entry.forms)]
    errors = ptxsim.load(assembler.module(texts)).unsupported()
    assert not errors, f"{title}: {errors[0]}"


def test_every_decoder_has_listed_forms() -> None:
    """Each registered opcode (or longer prefix) is the beginning of a form in the table."""
    import ptxsim.isa  # noqa: F401  (registers them)

    unlisted = [
        name
        for name in decode._BUILDERS
        if name not in REFUSED
        and not any(form == name or form.startswith(f"{name}.") for form in LISTED)
    ]
    assert not unlisted


@needs_assembler
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_assembler_knows_the_listed_forms(target: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = []
    for entry in ENTRIES:
        if arch(entry) != target:
            continue
        forms = list(expand(entry.forms))
        chosen = {forms[0], forms[-1], *rng.sample(forms, min(6, len(forms)))}
        texts += [sample(form, entry.operands) for form in sorted(chosen)]
    assert not assembler.complaints(texts, target, tmp_path)


def changed(form: str, vocabulary: list[str], rng: random.Random) -> str:
    """One modifier dropped, replaced or added."""
    parts = form.split(".")
    how = rng.randrange(3)
    if how == 0 and len(parts) > 1:
        parts.pop(rng.randrange(1, len(parts)))
    elif how == 1 and len(parts) > 1:
        parts[rng.randrange(1, len(parts))] = rng.choice(vocabulary)
    else:
        parts.insert(rng.randrange(1, len(parts) + 1), rng.choice(vocabulary))
    return ".".join(parts)


@needs_assembler
def test_what_decodes_and_is_ptx_is_listed(tmp_path: Path) -> None:
    """Neighbours of listed forms are refused by the decoder, or no PTX, or in the table.

    (Some that are no PTX decode: the assembler's more pedantic rules are not repeated here.)
    """
    rng = random.Random(11)
    vocabulary = sorted(
        {m for form in LISTED for m in form.split(".")[1:] if not re.fullmatch(r"m\d+n.*|x\d+", m)}
    )
    forms = sorted(form for form, entry in LISTED.items() if arch(entry) == "sm_100a")
    texts = {}
    for form in rng.choices(forms, k=2500):
        other = changed(form, vocabulary, rng)
        if normal(other) not in NORMAL:
            texts[sample(form, LISTED[form].operands).replace(form, other, 1)] = other
    instructions = sorted(texts)
    errors = ptxsim.load(assembler.module(instructions)).unsupported()
    refused = {e.line for e in errors if e.line is not None}
    decoded = [t for n, t in enumerate(instructions) if n + assembler.FIRST not in refused]
    assert len(decoded) < len(instructions) / 50
    legal = set(decoded) - set(assembler.complaints(decoded, "sm_100a", tmp_path))
    assert not legal


def test_the_documentation_has_the_table() -> None:
    text = DOCUMENT.read_text()
    begin, end = "<!-- forms: begin -->\n", "<!-- forms: end -->"
    printed = text.split(begin)[1].split(end)[0].strip()
    assert printed == markdown(CHAPTERS).strip(), "run `python -m ptxsim.forms docs/ptxsim.md`"


def test_the_documentation_names_every_error() -> None:
    text = DOCUMENT.read_text()
    errors = [
        name
        for name in ptxsim.__all__
        if isinstance(getattr(ptxsim, name), type)
        and issubclass(getattr(ptxsim, name), ptxsim.SimulationError)
    ]
    assert len(errors) > 10
    missing = [name for name in errors if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("add{,.sat}.{s32,u32}", ["add.s32", "add.u32", "add.sat.s32", "add.sat.u32"]),
        ("m64n{8..24/8}k16", ["m64n8k16", "m64n16k16", "m64n24k16"]),
        ("ret", ["ret"]),
    ],
)
def test_the_grammar_of_forms(form: str, expected: list[str]) -> None:
    assert list(expand(form)) == expected


def test_normal_forms_leave_hints_out_and_order_in() -> None:
    plain = normal("ld.global.b32")
    assert normal("ld.relaxed.gpu.global.L1::evict_last.L2::cache_hint.b32") == plain
    assert normal("cvt.rn.f32.f64") != normal("cvt.rn.f64.f32")
    assert normal("add.rn.ftz.f32") == normal("add.ftz.rn.f32")
