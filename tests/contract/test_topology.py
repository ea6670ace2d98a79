"""Topology: the model's shape, and every size it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from openmsa import MINIMAX_M3, Topology

from .messages import refuses


def test_minimax_m3_is_the_default():
    assert Topology() == MINIMAX_M3
    assert dataclasses.asdict(MINIMAX_M3) == {
        "q_heads": 64,
        "kv_heads": 4,
        "head_dim": 128,
        "index_dim": 128,
        "block_size": 128,
        "topk": 16,
        "init_blocks": 0,
        "local_blocks": 1,
    }
    assert MINIMAX_M3.group == 16


def test_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MINIMAX_M3.topk = 8
    assert len({Topology(), Topology(), Topology(topk=8)}) == 2


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "group"),
    [(1, 1, 1), (8, 8, 1), (12, 4, 3), (64, 1, 64), (128, 2, 64)],
    ids=lambda value: str(value),
)
def test_any_group_up_to_64(q_heads, kv_heads, group):
    assert Topology(q_heads=q_heads, kv_heads=kv_heads).group == group


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 64},
        {"head_dim": 96},
        {"block_size": 64},
        {"topk": 1},
        {"topk": 64},
        {"init_blocks": 15},
        {"init_blocks": 0, "local_blocks": 16},
        {"topk": 1, "local_blocks": 1},
    ],
    ids=str,
)
def test_other_topologies_are_welcome(sizes):
    topology = Topology(**sizes)
    assert {name: getattr(topology, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    "name", ["q_heads", "kv_heads", "head_dim", "index_dim", "block_size", "topk"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(name, value):
    with refuses(name, str(value)):
        Topology(**{name: value})


@pytest.mark.parametrize(
    ("sizes", "argument", "got"),
    [
        ({"q_heads": 6, "kv_heads": 4}, "q_heads", "6"),
        ({"q_heads": 65, "kv_heads": 1}, "q_heads", "65"),
        ({"topk": 65}, "topk", "65"),
        ({"init_blocks": -1}, "init_blocks", "-1"),
        ({"local_blocks": 0}, "local_blocks", "0"),
        ({"init_blocks": 16}, "init_blocks + local_blocks", "17"),
        ({"topk": 4, "local_blocks": 5}, "init_blocks + local_blocks", "5"),
    ],
    ids=[
        "group_not_whole",
        "group_of_65",
        "topk_65",
        "negative_init",
        "own_block_not_forced",
        "forced_exceed_topk_by_init",
        "forced_exceed_topk_by_local",
    ],
)
def test_refuses_what_cannot_be(sizes, argument, got):
    with refuses(argument, got):
        Topology(**sizes)
