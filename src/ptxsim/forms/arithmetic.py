"""Forms of arithmetic, comparison, logic and conversion."""

from __future__ import annotations

from ptxsim.forms.grammar import Entry

_INTEGER = "Integer Arithmetic"
_EXTENDED = "Extended-Precision Arithmetic"
_FLOAT = "Floating Point"
_HALF = "Half Precision Floating Point"
_COMPARE = "Comparison and Selection"
_LOGIC = "Logic and Shift"
_MOVE = "Data Movement and Conversion"

_ALL = "{u16,s16,u32,s32,u64,s64}"
_BITS = "{b16,b32,b64}"
_ORDERED = "{eq,ne,lt,le,gt,ge}"
_ANY = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"
_SET_FLOATS = (
    "{u32.f32,s32.f32,f32.f32,ftz.u32.f32,ftz.s32.f32,ftz.f32.f32,u32.f64,s32.f64,f32.f64"
    ",u32.f16,s32.f16,ftz.u32.f16,ftz.s32.f16,u32.bf16,s32.bf16}"
)
# Pairs (destination, source) of integers where a value can be out of range.
_OVERFLOWING = tuple(
    f"{d}{m}.{s}{n}"
    for d in "us"
    for m in (8, 16, 32, 64)
    for s in "us"
    for n in (8, 16, 32, 64)
    if m - (d == "s") < n - (s == "s") or (d == "u" and s == "s")
)
_ROUNDED = "correctly rounded: within every documented bound, a chip's last bits may differ"
_ZERO = "a zero divisor: all ones (rem: the dividend) and a warning; an error if strict"
_UNFUSED = "never fused; a chip's assembler may fuse a mul and an add without .rn"
_NAN = "NaN gives 0, or 1 << (n-1) where f64 or a 64-bit integer takes part"

_INTEGERS = (
    Entry(f"{_INTEGER}: add, sub", f"{{add,sub}}.{_ALL}", "T, T, T"),
    Entry(f"{_INTEGER}: add, sub", "{add,sub}.sat.s32", "T, T, T"),
    Entry(f"{_INTEGER}: add", "add.{u16x2,s16x2}", "r, r, r"),
    Entry(f"{_INTEGER}: mul", f"mul.{{lo,hi}}.{_ALL}", "T, T, T"),
    Entry(f"{_INTEGER}: mul", "mul.wide.{u16,s16,u32,s32}", "W, T, T"),
    Entry(f"{_INTEGER}: mad", f"mad.{{lo,hi}}.{_ALL}", "T, T, T, T"),
    Entry(f"{_INTEGER}: mad", "mad.wide.{u16,s16,u32,s32}", "W, T, T, W"),
    Entry(f"{_INTEGER}: mad", "mad.hi.sat.s32", "r, r, r, r"),
    Entry(f"{_INTEGER}: mul24", "mul24.{lo,hi}.{u32,s32}", "r, r, r"),
    Entry(f"{_INTEGER}: mad24", "mad24.{lo,hi}.{u32,s32}", "r, r, r, r"),
    Entry(f"{_INTEGER}: mad24", "mad24.hi.sat.s32", "r, r, r, r"),
    Entry(f"{_INTEGER}: sad", f"sad.{_ALL}", "T, T, T, T"),
    Entry(f"{_INTEGER}: div, rem", f"{{div,rem}}.{_ALL}", "T, T, T", _ZERO),
    Entry(f"{_INTEGER}: abs, neg", "{abs,neg}.{s16,s32,s64}", "T, T"),
    Entry(f"{_INTEGER}: min, max", f"{{min,max}}.{_ALL}", "T, T, T"),
    Entry(f"{_INTEGER}: min, max", "{min,max}.{u16x2,s16x2,relu.s16x2,relu.s32}", "r, r, r"),
    Entry(f"{_INTEGER}: popc, clz", "{popc,clz}.{b32,b64}", "r, T"),
    Entry(f"{_INTEGER}: bfind", "bfind{,.shiftamt}.{u32,s32,u64,s64}", "r, T"),
    Entry(f"{_INTEGER}: fns", "fns.b32", "r, r, r, r"),
    Entry(f"{_INTEGER}: brev", "brev.{b32,b64}", "T, T"),
    Entry(f"{_INTEGER}: bfe", "bfe.{u32,s32,u64,s64}", "T, T, r, r"),
    Entry(f"{_INTEGER}: bfi", "bfi.{b32,b64}", "T, T, T, r, r"),
    Entry(f"{_INTEGER}: szext", "szext.{clamp,wrap}.{u32,s32}", "r, r, r"),
    Entry(f"{_INTEGER}: bmsk", "bmsk.{clamp,wrap}.b32", "r, r, r"),
    Entry(f"{_INTEGER}: dp4a", "dp4a.{u32,s32}.{u32,s32}", "r, r, r, r"),
    Entry(f"{_INTEGER}: dp2a", "dp2a.{lo,hi}.{u32,s32}.{u32,s32}", "r, r, r, r"),
    Entry(
        f"{_EXTENDED}: add.cc, addc, sub.cc, subc",
        "{add.cc,addc,addc.cc,sub.cc,subc,subc.cc}.{u32,s32,u64,s64}",
        "T, T, T",
    ),
    Entry(
        f"{_EXTENDED}: mad.cc, madc",
        "{mad.lo.cc,mad.hi.cc,madc.lo,madc.hi,madc.lo.cc,madc.hi.cc}.{u32,s32,u64,s64}",
        "T, T, T, T",
    ),
)

_FLOATS = (
    Entry(
        f"{_FLOAT}: testp",
        "testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}",
        "p, T",
    ),
    Entry(f"{_FLOAT}: copysign", "copysign.{f32,f64}", "T, T, T"),
    Entry(
        f"{_FLOAT}: add, sub, mul",
        "{add,sub,mul}{,.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32",
        "T, T, T",
        _UNFUSED,
    ),
    Entry(f"{_FLOAT}: add, sub, mul", "{add,sub,mul}{,.rn,.rz,.rm,.rp}{,.ftz}.f32x2", "q, q, q"),
    Entry(f"{_FLOAT}: add, sub, mul", "{add,sub,mul}{,.rn}.f64", "T, T, T"),
    Entry(f"{_FLOAT}: fma, mad", "{fma,mad}.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32", "T, T, T, T"),
    Entry(f"{_FLOAT}: fma", "fma.{rn,rz,rm,rp}{,.ftz}.f32x2", "q, q, q, q"),
    Entry(f"{_FLOAT}: fma, mad", "{fma,mad}.rn.f64", "T, T, T, T"),
    Entry(f"{_FLOAT}: div", "div.{rn,approx,full}{,.ftz}.f32", "T, T, T", _ROUNDED),
    Entry(f"{_FLOAT}: div", "div.rn.f64", "T, T, T"),
    Entry(f"{_FLOAT}: abs, neg", "{abs,neg}{,.ftz}.f32", "T, T"),
    Entry(f"{_FLOAT}: abs, neg", "{abs,neg}.f64", "T, T"),
    Entry(f"{_FLOAT}: min, max", "{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f32", "T, T, T"),
    Entry(f"{_FLOAT}: min, max", "{min,max}{,.ftz}{,.NaN}.f32", "T, T, T, T", "three inputs"),
    Entry(f"{_FLOAT}: min, max", "{min,max}.f64", "T, T, T"),
    Entry(f"{_FLOAT}: rcp, sqrt", "{rcp,sqrt}.{approx,rn}{,.ftz}.f32", "T, T", _ROUNDED),
    Entry(f"{_FLOAT}: rcp, sqrt", "{rcp,sqrt}.rn.f64", "T, T"),
    Entry(
        f"{_FLOAT}: rsqrt, sin, cos, lg2, ex2",
        "{rsqrt,sin,cos,lg2,ex2}.approx{,.ftz}.f32",
        "T, T",
        _ROUNDED,
    ),
    Entry(f"{_FLOAT}: tanh", "tanh.approx.f32", "T, T", _ROUNDED),
    Entry(f"{_HALF}: add, sub, mul", "{add,sub,mul}{,.rn}{,.ftz}{,.sat}.{f16,f16x2}", "T, T, T"),
    Entry(f"{_HALF}: add, sub, mul", "{add,sub,mul}{,.rn}.{bf16,bf16x2}", "T, T, T"),
    Entry(f"{_HALF}: fma", "fma.rn{,.ftz}{,.sat,.relu}.{f16,f16x2}", "T, T, T, T"),
    Entry(f"{_HALF}: fma", "fma.rn{,.relu}.{bf16,bf16x2}", "T, T, T, T"),
    Entry(f"{_HALF}: neg, abs", "{neg,abs}{,.ftz}.{f16,f16x2}", "T, T"),
    Entry(f"{_HALF}: neg, abs", "{neg,abs}.{bf16,bf16x2}", "T, T"),
    Entry(f"{_HALF}: min, max", "{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.{f16,f16x2}", "T, T, T"),
    Entry(f"{_HALF}: min, max", "{min,max}{,.NaN}{,.xorsign.abs}.{bf16,bf16x2}", "T, T, T"),
    Entry(f"{_HALF}: tanh", "tanh.approx.{f16,f16x2,bf16,bf16x2}", "T, T", _ROUNDED),
    Entry(
        f"{_HALF}: ex2",
        "ex2.approx.{f16,f16x2,ftz.bf16,ftz.bf16x2}",
        "T, T",
        _ROUNDED,
    ),
)

_MIXED = (
    Entry(
        "Mixed Precision Floating Point: add, sub",
        "{add,sub}{,.rn,.rz,.rm,.rp}{,.sat}.f32.{f16,bf16}",
        "D, T, r",
    ),
    Entry(
        "Mixed Precision Floating Point: fma",
        "fma.{rn,rz,rm,rp}{,.sat}.f32.{f16,bf16}",
        "D, T, T, r",
    ),
)

_COMPARISONS = (
    Entry(f"{_COMPARE}: setp", f"setp.{_ORDERED}.{_ALL}", "p|p, T, T"),
    Entry(f"{_COMPARE}: setp", f"setp.{_ORDERED}.{{and,or,xor}}.{_ALL}", "p|p, T, T, !p"),
    Entry(f"{_COMPARE}: setp", "setp.{lo,ls,hi,hs}.{u16,u32,u64}", "p, T, T"),
    Entry(f"{_COMPARE}: setp", "setp.{lo,ls,hi,hs}.{and,or,xor}.{u16,u32,u64}", "p, T, T, p"),
    Entry(f"{_COMPARE}: setp", f"setp.{{eq,ne}}.{_BITS}", "p, T, T"),
    Entry(f"{_COMPARE}: setp", f"setp.{{eq,ne}}.{{and,or,xor}}.{_BITS}", "p, T, T, p"),
    Entry(f"{_COMPARE}: setp", f"setp.{_ANY}{{.f32,.ftz.f32,.f64,.f16,.ftz.f16,.bf16}}", "p, T, T"),
    Entry(
        f"{_COMPARE}: setp",
        f"setp.{_ANY}.{{and,or,xor}}{{.f32,.ftz.f32,.f64,.f16,.ftz.f16,.bf16}}",
        "p, T, T, !p",
    ),
    Entry(f"{_COMPARE}: setp", f"setp.{_ANY}{{.f16x2,.ftz.f16x2,.bf16x2}}", "p|p, T, T"),
    Entry(
        f"{_COMPARE}: setp",
        f"setp.{_ANY}.{{and,or,xor}}{{.f16x2,.ftz.f16x2,.bf16x2}}",
        "p|p, T, T, p",
    ),
    Entry(f"{_COMPARE}: set", f"set.{_ORDERED}.{{u32,s32,f32}}.{_ALL}", "r, T, T"),
    Entry(
        f"{_COMPARE}: set", f"set.{_ORDERED}.{{and,or,xor}}.{{u32,s32,f32}}.{_ALL}", "r, T, T, p"
    ),
    Entry(f"{_COMPARE}: set", "set.{lo,ls,hi,hs}.{u32,s32,f32}.{u16,u32,u64}", "r, T, T"),
    Entry(
        f"{_COMPARE}: set",
        "set.{lo,ls,hi,hs}.{and,or,xor}.{u32,s32,f32}.{u16,u32,u64}",
        "r, T, T, p",
    ),
    Entry(f"{_COMPARE}: set", f"set.{{eq,ne}}.{{u32,s32,f32}}.{_BITS}", "r, T, T"),
    Entry(
        f"{_COMPARE}: set", f"set.{{eq,ne}}.{{and,or,xor}}.{{u32,s32,f32}}.{_BITS}", "r, T, T, p"
    ),
    Entry(f"{_COMPARE}: set", f"set.{_ANY}.{_SET_FLOATS}", "r, T, T"),
    Entry(f"{_COMPARE}: set", f"set.{_ANY}.{{and,or,xor}}.{_SET_FLOATS}", "r, T, T, p"),
    Entry(f"{_COMPARE}: selp", "selp.{b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}", "T, T, T, p"),
    Entry(
        f"{_COMPARE}: slct",
        "slct.{b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}.s32",
        "D, D, D, r",
    ),
    Entry(
        f"{_COMPARE}: slct",
        "slct{,.ftz}.{b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}.f32",
        "D, D, D, r",
    ),
)

_LOGICAL = (
    Entry(f"{_LOGIC}: and, or, xor", "{and,or,xor}.{b16,b32,b64}", "T, T, T"),
    Entry(f"{_LOGIC}: and, or, xor", "{and,or,xor}.pred", "p, p, p"),
    Entry(f"{_LOGIC}: not, cnot", "{not,cnot}.{b16,b32,b64}", "T, T"),
    Entry(f"{_LOGIC}: not", "not.pred", "p, p"),
    Entry(f"{_LOGIC}: lop3", "lop3.b32", "r, r, r, r, 0x96"),
    Entry(f"{_LOGIC}: shf", "shf.{l,r}.{wrap,clamp}.b32", "r, r, r, r"),
    Entry(f"{_LOGIC}: shl", "shl.{b16,b32,b64}", "T, T, r"),
    Entry(f"{_LOGIC}: shr", "shr.{b16,u16,s16,b32,u32,s32,b64,u64,s64}", "T, T, r"),
    Entry(f"{_MOVE}: prmt", "prmt.b32{,.f4e,.b4e,.rc8,.ecl,.ecr,.rc16}", "r, r, r, r"),
)

_CONVERSIONS = (
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{u8,s8,u16,s16,u32,s32,u64,s64}.{u8,s8,u16,s16,u32,s32,u64,s64}",
        "D, T",
    ),
    Entry(
        f"{_MOVE}: cvt",
        f"cvt.sat.{{{','.join(_OVERFLOWING)}}}",
        "D, T",
        "pairs whose ranges allow it",
    ),
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{rn,rz,rm,rp}{,.sat}{.f16,.f32,.ftz.f32}.{u8,s8,u16,s16,u32,s32,u64,s64}",
        "D, T",
    ),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}.bf16.{u16,s16,u32,s32,u64,s64}", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}{,.sat}.f64.{u8,s8,u16,s16,u32,s32}", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.rn{,.sat}.f64.{u64,s64}", "D, T"),
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{rni,rzi,rmi,rpi}{,.sat}.{u8,s8,u16,s16,u32,s32,u64,s64}.{f16,f32,f64}",
        "D, T",
        _NAN,
    ),
    Entry(f"{_MOVE}: cvt", "cvt.{rni,rzi,rmi,rpi}.{u16,s16,u32,s32,u64,s64}.bf16", "D, T", _NAN),
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{rni,rzi,rmi,rpi}.ftz{,.sat}.{u8,s8,u16,s16,u32,s32,u64,s64}.f32",
        "D, T",
    ),
    Entry(f"{_MOVE}: cvt", "cvt{,.ftz}{,.sat}.f32.{f16,f32}", "D, T"),
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{f32.bf16,ftz.f32.bf16,f64.f16,f64.bf16,f64.f32,ftz.f64.f32,f64.f64,f16.f16,bf16.bf16}",
        "D, T",
    ),
    Entry(f"{_MOVE}: cvt", "cvt.sat.{f16.f16,f64.f16,f64.f32,ftz.f64.f32,f64.f64}", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}.{f32.bf16,ftz.f32.bf16,f64.bf16}", "D, T", "exact"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32.f64", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}{.f16.f64,.sat.f16.f64,.f16.bf16}", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}{,.ftz}{,.sat}.f16.f32", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}.bf16.{f16,f64}", "D, T"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz,rm,rp}{,.ftz}.bf16.f32", "D, T"),
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{rni,rzi,rmi,rpi}{.f16.f16,.sat.f16.f16,.bf16.bf16,.f32.f32,.ftz.f32.f32,.sat.f32.f32,.ftz.sat.f32.f32,.f64.f64,.sat.f64.f64}",
        "D, T",
    ),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz}{,.relu}{,.satfinite}.{f16,bf16}.f32", "D, T"),
    Entry(
        f"{_MOVE}: cvt",
        "cvt.{rn,rz}{,.relu}{,.satfinite}.{f16x2,bf16x2}.f32",
        "r, r, r",
        "the first source goes to the high half",
    ),
    Entry(f"{_MOVE}: cvt", "cvt.{rna,rn,rz}{,.satfinite}.tf32.f32", "r, r"),
    Entry(f"{_MOVE}: cvt", "cvt.{rn,rz}.relu{,.satfinite}.tf32.f32", "r, r"),
    Entry(f"{_MOVE}: cvt", "cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.f32", "h, r, r"),
    Entry(f"{_MOVE}: cvt", "cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.f16x2", "h, r"),
    Entry(f"{_MOVE}: cvt", "cvt.rn{,.relu}.f16x2.{e4m3x2,e5m2x2}", "r, h"),
)

ARITHMETIC = (*_INTEGERS, *_FLOATS, *_MIXED, *_COMPARISONS, *_LOGICAL, *_CONVERSIONS)
