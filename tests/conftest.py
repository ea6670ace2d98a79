"""What tests share: the trials (problem x dtype x backend) and their oracles, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import openmsa
from openmsa import MINIMAX_M3, Documents, Selection
from openmsa.testing import (
    AttentionTruth,
    Case,
    Inputs,
    attention_truth,
    poisoned_memory,
    problem,
    problems,
)

BACKENDS = ("reference", "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

LONG = (
    "sm90/test_backward.py",
    "triton_stages/test_ahead.py",
    "sm100/test_backward.py",
    "triton_stages/test_interpreter.py",
    "sm90/test_forward.py",
    "ptxsim/test_kernels_peers.py",
    "stages/test_backward.py",
)
"""Files that take minutes, the longest first: two processes then end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of `LONG` before all others."""

    def place(item: pytest.Item) -> int:
        found = [i for i, name in enumerate(LONG) if item.path.as_posix().endswith(f"/{name}")]
        return found[0] if found else len(LONG)

    items.sort(key=place)


@dataclass(frozen=True)
class Trial:
    """One problem in one dtype on one backend."""

    case: Case
    dtype: torch.dtype
    backend: str

    def __str__(self) -> str:
        return f"{self.case.name}-{str(self.dtype).removeprefix('torch.')}-{self.backend}"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem's operands and truth; they are shared, so no test may write to them."""

    docs: Documents
    inputs: Inputs
    selection: Selection
    truth: AttentionTruth


def trials() -> list[Trial]:
    """Smoke problems in every dtype, the rest in bf16 and fp32; the slow reference in fewer."""
    found = []
    for case in problems("full"):
        smoke = case.suite == "smoke"
        dtypes = {
            "cpu": DTYPES if smoke else (torch.bfloat16, torch.float32),
            "reference": (torch.bfloat16, torch.float64) if smoke else (torch.float32,),
        }
        if case.topology == MINIMAX_M3:
            # Its 64 heads by 2048 keys a query take the reference ten seconds.
            dtypes["reference"] = ()
        found += [Trial(case, dtype, backend) for backend in BACKENDS for dtype in dtypes[backend]]
    return found


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Problems are so small that a second thread would only wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=trials(), ids=str)
def trial(request: pytest.FixtureRequest) -> Trial:
    """One problem in one dtype on one backend."""
    return request.param


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that runs on any host."""
    return request.param


@cache
def _prepared(name: str, dtype: torch.dtype, with_d_lse: bool) -> Prepared:
    case = problem(name)
    docs, inputs = case.documents(), case.inputs(dtype)
    selection = case.selection(inputs, docs)
    truth = attention_truth(
        inputs, selection.indices, docs, selection.block_size, with_d_lse=with_d_lse
    )
    return Prepared(docs, inputs, selection, truth)


@pytest.fixture(scope="session")
def prepared() -> Callable[..., Prepared]:
    """``prepared(case, dtype, with_d_lse=True)``, cached: both backends meet the same tensors."""

    def prepare(case: Case, dtype: torch.dtype, with_d_lse: bool = True) -> Prepared:
        return _prepared(case.name, dtype, with_d_lse)

    return prepare


@pytest.fixture(scope="session")
def attend() -> Callable[..., dict[str, Tensor]]:
    """Run forward and backward in poisoned memory; gives out, lse, dq, dk and dv."""

    def run(
        inputs: Inputs,
        selection: Selection,
        docs: Documents,
        backend: str,
        *,
        with_d_lse: bool = True,
        **options: object,
    ) -> dict[str, Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        with poisoned_memory():
            out, lse = openmsa.sparse_attention(
                q, k, v, selection, docs, return_lse=True, backend=backend, **options
            )
            outputs, grads = [out], [inputs.d_out]
            if with_d_lse:
                outputs, grads = [out, lse], [inputs.d_out, inputs.d_lse]
            dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
        return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    return run
