"""The integer record of a backward launch: what it accepts, and what it refuses in which words."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from openmsa import InvalidInput
from openmsa.contract import MINIMAX_M3
from openmsa.contract.checks import check_scale
from openmsa.kernels import schedule
from openmsa.kernels.schedule import BackwardSchedule
from openmsa.reference.schedule import key_schedule, task_build
from openmsa.testing import problem

HEADS, ROWS, EDGES, TASKS, ENTRIES, RANGES = 4, 6, 64, 10, 3, 2
SHAPES = {
    "row_ptr": (HEADS, ROWS + 1),
    "queries": (HEADS, EDGES),
    "tasks": (TASKS, 4),
    "count": (1,),
    "cu_seqlens_q": (ENTRIES + 1,),
    "spans": (ENTRIES, 3),
    "ranges": (RANGES, 2),
}


def fields(**changed: object) -> dict[str, Tensor]:
    made = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in SHAPES.items()}
    return {**made, **changed}


def test_the_fields_are_kept_as_they_are() -> None:
    given = fields()
    made = BackwardSchedule(**given)
    assert [field.name for field in dataclasses.fields(made)] == list(SHAPES)
    for name, value in given.items():
        assert getattr(made, name) is value


def test_the_record_is_frozen_and_slotted() -> None:
    made = BackwardSchedule(**fields())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.count = torch.zeros(1, dtype=torch.int32)
    assert not hasattr(made, "__dict__")


def test_empty_problems_fit() -> None:
    empty = {
        "row_ptr": (HEADS, 1),
        "queries": (HEADS, 0),
        "tasks": (0, 4),
        "cu_seqlens_q": (1,),
        "spans": (0, 3),
        "ranges": (0, 2),
    }
    BackwardSchedule(
        **fields(**{name: torch.zeros(s, dtype=torch.int32) for name, s in empty.items()})
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32, torch.bool], ids=str)
def test_another_dtype_is_refused(name: str, dtype: torch.dtype) -> None:
    wrong = torch.zeros(SHAPES[name], dtype=dtype)
    with pytest.raises(InvalidInput) as error:
        BackwardSchedule(**fields(**{name: wrong}))
    assert str(error.value) == f"BackwardSchedule.{name}: expected int32, got {dtype}"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("change", ["more", "less"])
def test_another_rank_is_refused(name: str, change: str) -> None:
    good = torch.zeros(SHAPES[name], dtype=torch.int32)
    wrong = good[..., None] if change == "more" else good[0]
    with pytest.raises(InvalidInput) as error:
        BackwardSchedule(**fields(**{name: wrong}))
    assert str(error.value).startswith(f"BackwardSchedule.{name}: expected shape [")
    assert str(error.value).endswith(f", got shape {tuple(wrong.shape)}")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("row_ptr", (HEADS, 0), "at least one offset"),
        ("queries", (HEADS + 1, EDGES), "shape [4, capacity]"),
        ("queries", (HEADS - 1, EDGES), "shape [4, capacity]"),
        ("tasks", (TASKS, 3), "shape [capacity, 4]"),
        ("tasks", (TASKS, 5), "shape [capacity, 4]"),
        ("tasks", (4, TASKS), "shape [capacity, 4]"),
        ("count", (0,), "shape [1]"),
        ("count", (2,), "shape [1]"),
        ("cu_seqlens_q", (0,), "shape [-1, 3]"),
        ("cu_seqlens_q", (ENTRIES,), "shape [2, 3]"),
        ("cu_seqlens_q", (ENTRIES + 2,), "shape [4, 3]"),
        ("spans", (ENTRIES, 2), "shape [N, 3]"),
        ("spans", (ENTRIES + 1, 3), "shape [3, 3]"),
        ("ranges", (RANGES, 3), "shape [M, 2]"),
        ("ranges", (RANGES, 1), "shape [M, 2]"),
    ],
)
def test_another_width_is_refused(name: str, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(InvalidInput) as error:
        BackwardSchedule(**fields(**{name: torch.zeros(shape, dtype=torch.int32)}))
    # The entries of spans and cu_seqlens_q are counted against each other.
    named = "spans" if name == "cu_seqlens_q" else name
    assert f"BackwardSchedule.{named}: " in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "row_ptr"])
def test_another_device_is_refused(name: str) -> None:
    wrong = torch.zeros(SHAPES[name], dtype=torch.int32, device="meta")
    with pytest.raises(InvalidInput) as error:
        BackwardSchedule(**fields(**{name: wrong}))
    assert str(error.value) == (
        f"BackwardSchedule.{name}: expected row_ptr's device (cpu), got meta"
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [None, [[0]], 3], ids=str)
def test_what_is_no_tensor_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as error:
        BackwardSchedule(**fields(**{name: value}))
    assert f"BackwardSchedule.{name}: expected an int32 tensor, got" in str(error.value)


def test_fields_on_a_device_without_storage_are_not_read() -> None:
    """Only sizes are checked: reading a value would wait for the device."""
    BackwardSchedule(**{name: value.to("meta") for name, value in fields().items()})


@pytest.mark.parametrize(
    "name", ["no_documents", "one_token", "ragged_lengths", "fragments_with_hot_block"]
)
def test_the_stages_of_a_backward_give_one(name: str) -> None:
    case = problem(name)
    docs = case.documents()
    selection = case.selection(case.inputs(torch.float32), docs)
    keys = key_schedule(selection.indices, docs.layout, selection.block_size)
    tasks = task_build(keys, 16, docs.num_queries)
    made = BackwardSchedule.of(keys, tasks, docs.layout)
    assert made.row_ptr is keys.row_ptr
    assert made.queries is keys.queries
    assert made.tasks is tasks.tasks
    assert made.count is tasks.count
    assert made.cu_seqlens_q is docs.layout.cu_seqlens_q
    assert made.spans is docs.layout.spans
    assert made.ranges is docs.layout.ranges


def test_the_constants_are_those_of_the_model() -> None:
    assert schedule.NUM_Q_HEADS == MINIMAX_M3.q_heads == 64
    assert schedule.NUM_KV_HEADS == schedule.NUM_INDEX_HEADS == MINIMAX_M3.kv_heads == 4
    assert schedule.HEAD_DIM == schedule.INDEX_DIM == schedule.BLOCK_SIZE == 128
    assert schedule.TOPK_BLOCKS == MINIMAX_M3.topk == 16
    assert schedule.QUERIES_PER_TASK == 8
    assert check_scale("scale", None, 128) == schedule.SOFTMAX_SCALE, "the public default"
