"""Named problems of other heads, dims and block sizes; see :mod:`openmsa.testing.problems`."""

from __future__ import annotations

from itertools import accumulate

from openmsa.contract import MINIMAX_M3, Topology
from openmsa.testing.case import Case, Values

__all__ = ["ONE_GROUP", "TOPOLOGIES", "heads", "packed"]


def packed(*lengths: int) -> tuple[int, ...]:
    """Offsets of documents of these lengths."""
    return (0, *accumulate(lengths))


def heads(q: int, kv: int, dim: int = 16, block: int = 64, topk: int = 4) -> Topology:
    """A topology by its head counts."""
    return Topology(q, kv, dim, dim, block, topk)


_MERGED = Topology(4, 2, 32, 32, 64, 4, init_blocks=1, local_blocks=2)

TOPOLOGIES = (
    Case("topk_1", heads(4, 2, 16, topk=1), packed(200, 70), suite="smoke", source="MoBA#26"),
    Case("topk_8", heads(2, 1, 16, 16, 8), packed(300)),
    Case("topk_32", heads(2, 1, 16, 16, 32), packed(40 * 16 + 3), source="vllm-ascend#12734"),
    Case("topk_64", heads(1, 1, 8, 16, 64), packed(70 * 16 + 3), source="vllm-ascend#12734"),
    Case(
        "topk_over_blocks",
        heads(4, 2, 32, 128, 16),
        packed(100),
        suite="smoke",
        source="native-sparse-attention-pytorch#18",
    ),
    Case("init_and_local_blocks", _MERGED, packed(520, 60), suite="smoke", source="forced blocks"),
    Case(
        "only_forced_blocks",
        Topology(2, 1, 16, 16, 64, 5, init_blocks=2, local_blocks=3),
        packed(600),
        source="forced blocks fill top-k",
    ),
    Case("mha", heads(4, 4, 64), packed(150, 33), suite="smoke", source="kernels-community#1085"),
    Case("group_4_dim_96", heads(8, 2, 96), packed(130), source="tilelang-ascend#1669"),
    Case("group_16_dim_128", heads(16, 1, 128, 128, 8), packed(140), suite="smoke"),
    Case("group_64_dim_64", heads(64, 1, 64, topk=3), packed(131), source="flash-attention#2623"),
    Case("dim_8_index_24", Topology(6, 2, 8, 24, 64, 2), packed(200)),
    Case("minimax_m3", MINIMAX_M3, packed(130, 70, 1), source="the model's own topology"),
)

_M3_GROUP = heads(16, 1, 128, 128, 16)

ONE_GROUP = (
    Case("m3_group_ragged", _M3_GROUP, packed(3, 129, 1, 2), suite="smoke"),
    Case("m3_group_seventeen_blocks", _M3_GROUP, (0, 24), (0, 17 * 128 + 5), suite="smoke"),
    Case(
        "m3_group_shared_keys",
        heads(16, 1, 128, 128, 2),
        (0, 64, 92, 124),
        (0, 192, 220, 350),
        (0, 0, 2),
        suite="smoke",
        source="MiniMax-AI/MSA context-parallel fragments",
    ),
    Case(
        "m3_group_gaps", heads(16, 1, 128, 128, 4), packed(140, 66), select="gaps", slack=5,
        suite="smoke", source="cudnn-frontend#676, vllm#49054",
    ),
    Case(
        "m3_group_loud_and_quiet", _M3_GROUP, packed(130, 40),
        values=Values(logits=(30.0, 1.0)), suite="smoke",
    ),
)  # fmt: skip
"""One of MiniMax-M3's KV groups: what kernels that know no other head dim are held to."""
