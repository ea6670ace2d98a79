"""Gates: needed minus offered, a reason for every lack, and never an exception of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openmsa.contract.problem import Problem
from openmsa.dispatch.choose import choose_with, supports
from openmsa.dispatch.probe import DeviceFacts, Toolchain
from openmsa.dispatch.support import Offer, Support, misfits, support
from openmsa.dispatch.table import ORDER, STAGES, TABLE

from .fakes import (
    A40,
    ATTENTION,
    B200,
    B300,
    BARE,
    BOTH,
    CPU,
    CUTE,
    DEVICES,
    H200,
    PROBLEMS,
    RTX5090,
    TOOLS,
    TRITON,
    UNKNOWN_GPU,
    row,
)

HOPPER_ONLY = Offer(
    devices=("cuda",),
    capabilities=((9, 0), (9, 0)),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(64, 128),
    block_sizes=(128,),
    groups=range(1, 17),
    topks=range(1, 33),
    package="cute_dsl",
    shared_memory=lambda problem: 100_000,
)


def changed(**facts) -> Problem:
    return dataclasses.replace(ATTENTION, **facts)


def test_what_is_offered_is_supported():
    assert support(ATTENTION, HOPPER_ONLY, H200, CUTE) == Support(True, ())


@pytest.mark.parametrize(
    ("problem", "facts", "tools", "words"),
    [
        (changed(dtype=torch.float32), H200, CUTE, ["dtype", "float32", "bfloat16", "float16"]),
        (changed(head_dim=96), H200, CUTE, ["head_dim", "96", "64", "128"]),
        (changed(block_size=64), H200, CUTE, ["block_size", "64", "128"]),
        (changed(q_heads=128), H200, CUTE, ["group", "32", "1..16"]),
        (changed(topk=33), H200, CUTE, ["topk", "33", "1..32"]),
        (ATTENTION, B200, CUTE, ["capability", "(10, 0)", "(9, 0)"]),
        (ATTENTION, A40, CUTE, ["capability", "(8, 6)", "(9, 0)"]),
        (ATTENTION, UNKNOWN_GPU, CUTE, ["capability", "None", "(9, 0)"]),
        (ATTENTION, CPU, CUTE, ["device", "cpu", "cuda"]),
        (ATTENTION, H200, BARE, ["cute_dsl", "not installed"]),
        (ATTENTION, H200, TRITON, ["cute_dsl", "not installed"]),
        (
            ATTENTION,
            dataclasses.replace(H200, shared_memory=65_536),
            CUTE,
            ["shared memory", "100000", "65536"],
        ),
    ],
    ids=[
        "dtype",
        "head_dim",
        "block_size",
        "group",
        "topk",
        "too_new",
        "too_old",
        "no_capability",
        "cpu",
        "no_toolchain",
        "other_toolchain",
        "shared_memory",
    ],
)
def test_a_single_lack_is_a_single_reason(problem, facts, tools, words):
    """The reason says what is needed and what is offered. The shared memory case is
    radixark/miles#3155: a hard error at the first forward instead of an answer before it."""
    answer = support(problem, HOPPER_ONLY, facts, tools)
    assert not answer.ok
    about = [reason for reason in answer.reasons if all(word in reason for word in words)]
    assert len(about) == 1, answer.reasons
    # A device that does not tell its capability lacks its shared memory size as well.
    if facts is not UNKNOWN_GPU:
        assert len(answer.reasons) == 1, answer.reasons


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        (H200, []),
        (dataclasses.replace(H200, shared_memory=0), []),
        (CPU, ["device: needs cpu, offers cuda"]),
        (A40, ["compute capability: needs (8, 6), offers (9, 0) to (9, 0)"]),
        (UNKNOWN_GPU, ["compute capability: needs None, offers (9, 0) to (9, 0)"]),
    ],
    ids=["own", "small", "cpu", "old", "no_capability"],
)
def test_what_a_device_is_told_whatever_the_problem(facts, reasons):
    """The kind and the capability say which family a device is of; the rest is the problem's."""
    assert misfits(HOPPER_ONLY, facts) == reasons
    exact = dataclasses.replace(HOPPER_ONLY, capabilities=None, exact=((9, 0),))
    assert misfits(exact, facts) == [reason.replace(" to (9, 0)", "") for reason in reasons]
    answer = support(changed(dtype=torch.float64), HOPPER_ONLY, facts, BARE)
    assert list(answer.reasons[: len(reasons)]) == reasons, "said first"
    assert "dtype" in answer.reasons[len(reasons)]


def test_no_determinism():
    offer = dataclasses.replace(HOPPER_ONLY, deterministic=False)
    assert support(ATTENTION, offer, H200, CUTE).ok
    answer = support(changed(deterministic=True), offer, H200, CUTE)
    assert not answer.ok
    assert "deterministic" in answer.reasons[0]
    assert support(changed(deterministic=True), HOPPER_ONLY, H200, CUTE).ok


def test_every_lack_is_told_at_once():
    """One refusal to read, not one after the other."""
    problem = changed(dtype=torch.float64, head_dim=80, block_size=64, topk=64)
    answer = support(problem, HOPPER_ONLY, CPU, BARE)
    text = " | ".join(answer.reasons)
    for word in ("dtype", "head_dim", "block_size", "topk", "device", "cute_dsl"):
        assert word in text


@pytest.mark.parametrize(
    ("low", "high", "inside"),
    [
        ((8, 0), (12, 1), ["sm80", "sm86", "sm90", "sm100", "sm103", "sm120"]),
        ((9, 0), (9, 0), ["sm90"]),
        ((10, 0), (10, 3), ["sm100", "sm103"]),
        ((10, 0), (10, 0), ["sm100"]),
        ((8, 0), (8, 9), ["sm80", "sm86"]),
        ((12, 0), (12, 1), ["sm120"]),
    ],
    ids=["all", "sm90", "sm10x", "sm100", "sm8x", "sm12x"],
)
def test_families_of_capabilities(low, high, inside):
    """flash-attention#2572, cutlass#2802: SM103 and SM121 refused, or ordered wrongly by enum."""
    offer = Offer(devices=("cuda",), capabilities=(low, high))
    found = [name for name, facts in DEVICES.items() if support(ATTENTION, offer, facts, BARE).ok]
    assert found == inside


def test_capability_is_compared_as_numbers():
    """As text (12, 1) would lie before (9, 0)."""
    facts = dataclasses.replace(RTX5090, capability=(12, 1))
    assert support(ATTENTION, Offer(capabilities=((9, 0), (12, 1))), facts, BARE).ok
    assert not support(ATTENTION, Offer(capabilities=((10, 0), (10, 3))), facts, BARE).ok


def test_capabilities_do_not_concern_a_cpu():
    offer = Offer(devices=("cpu", "cuda"), capabilities=((9, 0), (9, 0)))
    assert support(ATTENTION, offer, CPU, BARE).ok


problems = st.builds(
    Problem,
    st.sampled_from(["select", "attention"]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.sampled_from(
        [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.complex64]
    ),
    st.integers(1, 300),
    st.integers(1, 9),
    st.integers(0, 600),
    st.integers(1, 4096),
    st.integers(1, 100),
    st.booleans(),
)
devices = st.one_of(
    st.sampled_from(list(DEVICES.values())),
    st.builds(
        DeviceFacts,
        st.sampled_from(["cuda", "cpu", "mps", "meta"]),
        st.just("?"),
        st.one_of(st.none(), st.tuples(st.integers(0, 20), st.integers(0, 9))),
        st.just(0),
        st.just(0),
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems, devices, st.sampled_from(list(TOOLS.values())))
def test_gates_answer_and_never_raise(problem, facts, tools):
    """Whatever is asked: yes without a reason, or no with reasons in words."""
    for backend in ORDER:
        answers = supports(backend, problem, facts, tools)
        assert tuple(answers) == STAGES[problem.work]
        for answer in answers.values():
            assert isinstance(answer, Support)
            assert answer.ok == (not answer.reasons)
            assert all(isinstance(reason, str) and reason for reason in answer.reasons)


def test_an_answer_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Support(True).ok = False


@pytest.mark.parametrize("work", PROBLEMS)
def test_an_exception_inside_a_gate_is_a_bug_and_propagates(work, monkeypatch):
    """fla counts it as "unsupported", so that a broken gate looks like a missing feature."""

    class Broken(Toolchain):
        def version(self, package):
            raise RuntimeError("a bug in a gate")

    monkeypatch.setitem(TABLE, "triton", row(Offer(package="triton")))
    tools = Broken("3.11.7", "2.13.0")
    with pytest.raises(RuntimeError, match="a bug in a gate"):
        supports("triton", PROBLEMS[work], H200, tools)
    for backend in ("triton", "auto"):
        with pytest.raises(RuntimeError, match="a bug in a gate"):
            choose_with(PROBLEMS[work], backend, H200, tools)


@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize("facts", [H200, B300], ids=["sm90", "sm103"])
def test_a_missing_toolchain_is_never_supported(facts, tools):
    """Whatever kernels there are: without Triton no Triton, without the DSL no CuTe."""
    for backend, package in (("triton", "triton"), ("cute", "cute_dsl")):
        if tools.version(package) is None:
            for problem in PROBLEMS.values():
                answers = supports(backend, problem, facts, tools).values()
                assert any(not answer.ok for answer in answers)


def test_toolchains_say_their_versions():
    text = str(BOTH)
    for word in ("python 3.11.7", "torch 2.13.0", "triton 3.6.0", "4.6.2"):
        assert word in text
    assert str(BARE).count("not installed") == 2


def test_devices_say_their_capability():
    assert "H200" in str(H200)
    assert "9.0" in str(H200)
    assert str(CPU) == "an x86 CPU"
