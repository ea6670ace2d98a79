"""The named problems that every backend meets: ordinary ones and inputs that broke other libraries.

``source`` says where a problem comes from, mostly a public report. Sizes are as small as the
property allows, so that the dense float64 oracle stays cheap. A new input that broke something
belongs here.
"""

from __future__ import annotations

from itertools import accumulate

from openmsa.contract import MINIMAX_M3, Topology
from openmsa.errors import invalid_input
from openmsa.testing.case import Case, Values

__all__ = ["PROBLEMS", "SUITES", "problem", "problems"]

SUITES = ("smoke", "full")


def problems(suite: str = "smoke") -> tuple[Case, ...]:
    """The problems of a suite; ``"full"`` contains ``"smoke"``.

    Raises:
        InvalidInput: an unknown suite.
    """
    if suite not in SUITES:
        invalid_input("suite", f"one of {', '.join(SUITES)}", repr(suite))
    return tuple(case for case in PROBLEMS if suite == "full" or case.suite == "smoke")


def problem(name: str) -> Case:
    """The problem of that name.

    Raises:
        InvalidInput: an unknown name.
    """
    for case in PROBLEMS:
        if case.name == name:
            return case
    invalid_input("name", f"one of {', '.join(case.name for case in PROBLEMS)}", repr(name))


def _packed(*lengths: int) -> tuple[int, ...]:
    return (0, *accumulate(lengths))


def _heads(q: int, kv: int, dim: int = 16, block: int = 64, topk: int = 4) -> Topology:
    return Topology(q, kv, dim, dim, block, topk)


_TINY = _heads(2, 1, topk=16)
_MERGED = Topology(4, 2, 32, 32, 64, 4, init_blocks=1, local_blocks=2)

_DOCUMENTS = (
    Case(
        "one_token", _heads(1, 1, topk=16), _packed(1), suite="smoke", source="flash-attention#334"
    ),
    Case("no_tokens", _TINY, _packed(0, 0), suite="smoke", source="empty documents only"),
    Case("no_documents", _TINY, (0,), source="an empty batch"),
    Case(
        "ragged_lengths",
        _heads(4, 2, 32, 128),
        _packed(127, 129, 1, 2, 3, 5, 128),
        suite="smoke",
        source="lengths around a block and of a few tokens; microsoft/MInference#201",
    ),
    Case(
        "empty_documents_between",
        _heads(4, 2, 16),
        _packed(0, 128, 0, 0, 70, 0),
        suite="smoke",
        source="fla#103",
    ),
    Case("block_multiples", _heads(2, 2, 16, 128), _packed(128, 256), source="MInference#201"),
    Case("two_key_tail", _heads(2, 1, 64, 128), _packed(130), source="vllm-ascend#13391"),
    Case("off_grid_documents", _heads(8, 2, 32, 128), _packed(100, 156), source="flash-msa"),
    Case("packed_64_192", _heads(8, 2, 32), _packed(64, 192), source="TransformerEngine#3333"),
    Case(
        "more_blocks_than_topk",
        _heads(1, 1, topk=16),
        _packed(17 * 64 + 1),
        suite="smoke",
        source="ROCm/ATOM#1368",
    ),
    Case(
        "more_blocks_than_topk_128",
        _heads(1, 1, 16, 128, 16),
        _packed(17 * 128 + 1),
        source="ROCm/ATOM#1368",
    ),
    Case(
        "slack_rows",
        _heads(4, 2, 32),
        _packed(130, 65),
        select="random",
        slack=37,
        suite="smoke",
        source="tilelang#2461, flashinfer#5015",
    ),
)

_FRAGMENTS = (
    Case(
        "more_queries_than_keys",
        _heads(4, 2, 16, 128),
        (0, 76, 110, 256),
        (0, 1, 2, 3),
        values=Values(logits=(3.0,), v=3.0),
        suite="smoke",
        source="flash-attention#443",
    ),
    Case(
        "zero_length_query_segments",
        _heads(1, 1, 16, 128),
        (0, 0, 1208, 2048, 2048),
        (0, 2538, 4280, 5120, 8192),
        source="flash-attention#2562",
    ),
    Case(
        "segment_without_queries",
        _heads(2, 1, 32, 128),
        (0, 0, 128),
        (0, 128, 256),
        suite="smoke",
        source="flash-attention#2421",
    ),
    Case(
        "segments_without_keys",
        _heads(1, 1, 16, 128),
        (0, 0, 0, 1023),
        (0, 0, 1, 2046),
        source="flash-attention#1254",
    ),
    Case(
        "fragments_share_keys",
        _heads(4, 2, 16, topk=2),
        (0, 64, 192, 224, 256),
        (0, 192, 320, 416, 480),
        (0, 0, 2, 2),
        suite="smoke",
        source="MiniMax-AI/MSA context-parallel fragments",
    ),
    Case(
        "fragment_end_cuts_own_block",
        _heads(4, 2, 16, topk=3),
        (0, 84, 128, 200, 233, 234),
        (0, 134, 178, 300, 352, 353),
        (0, 0, 2, 2, 2),
        suite="smoke",
        source="MiniMax-AI/MSA context-parallel fragments",
    ),
    Case(
        "fragments_with_hot_block",
        _heads(2, 1, 16, topk=2),
        (0, 100, 100, 160, 200),
        (0, 150, 270, 300, 490),
        (0, 0, 0, 3),
        select="hot",
        source="cudnn-frontend#384 over shared keys",
    ),
)

_NUMBERS = (
    Case(
        "inputs_x3",
        _heads(1, 1, 64, 128),
        _packed(320),
        values=Values(logits=(3.0,), v=3.0),
        suite="smoke",
        source="flash-attention#1052, #1311",
    ),
    Case(
        "logits_x900",
        _heads(2, 1, 32),
        _packed(200),
        values=Values(logits=(30.0,)),
        source="softmax far beyond exp's range without a shift",
    ),
    Case(
        "loud_and_quiet_documents",
        _heads(4, 2, 32),
        _packed(150, 90, 70, 1),
        values=Values(logits=(30.0, 1.0)),
        suite="smoke",
        source="a loud document must not cost a quiet one its accuracy",
    ),
    Case(
        "very_negative_lse",
        _heads(2, 2, 64, 128),
        (0, 1),
        (0, 128),
        values=Values(apart=11.2),
        suite="smoke",
        source="cudnn-frontend#1072",
    ),
    Case(
        "ascending_values",
        _heads(2, 1, 16),
        _packed(190),
        values=Values(ramp=True),
        source="native-sparse-attention#32",
    ),
    Case(
        "large_output_gradient",
        _heads(2, 2, 32),
        _packed(150),
        values=Values(d_out=4096.0),
        source="NeMo Automodel#3809",
    ),
)

_SELECTIONS = (
    Case("random_blocks", _heads(4, 2, 16, topk=3), _packed(300, 97), select="random"),
    Case("recent_blocks", _heads(4, 2, 16, topk=2), _packed(300, 97), select="recent"),
    Case(
        "hot_block",
        _heads(4, 2, 16, topk=4),
        _packed(520),
        select="hot",
        suite="smoke",
        source="cudnn-frontend#384, #385",
    ),
    Case("few_candidates", _heads(4, 2, 16, topk=8), _packed(300), select="few"),
    Case(
        "rows_without_block",
        _heads(4, 2, 32, topk=4),
        _packed(260, 66),
        select="gaps",
        suite="smoke",
        source="cudnn-frontend#676, vllm#49054",
    ),
    Case(
        "raw_ids",
        _heads(4, 2, 16, topk=8),
        _packed(260, 66),
        select="raw",
        slack=5,
        suite="smoke",
        source="cudnn-frontend#676, FastVideo#1243",
    ),
    Case(
        "equal_scores",
        _heads(2, 2, 16, topk=3),
        _packed(400),
        values=Values(index="equal"),
        suite="smoke",
        source="ties: the lower block id wins",
    ),
    Case(
        "tied_integer_scores",
        _heads(2, 2, 4, 16, 3),
        _packed(300, 41),
        values=Values(index="integers"),
        source="ties: the lower block id wins",
    ),
    Case(
        "nonfinite_scores",
        _heads(2, 2, 4, 64, 3),
        _packed(400),
        values=Values(index="nonfinite"),
        source="NaN ranks as -inf",
    ),
)

_TOPOLOGIES = (
    Case("topk_1", _heads(4, 2, 16, topk=1), _packed(200, 70), suite="smoke", source="MoBA#26"),
    Case("topk_8", _heads(2, 1, 16, 16, 8), _packed(300)),
    Case("topk_32", _heads(2, 1, 16, 16, 32), _packed(40 * 16 + 3), source="vllm-ascend#12734"),
    Case("topk_64", _heads(1, 1, 8, 16, 64), _packed(70 * 16 + 3), source="vllm-ascend#12734"),
    Case(
        "topk_over_blocks",
        _heads(4, 2, 32, 128, 16),
        _packed(100),
        suite="smoke",
        source="native-sparse-attention-pytorch#18",
    ),
    Case("init_and_local_blocks", _MERGED, _packed(520, 60), suite="smoke", source="forced blocks"),
    Case(
        "only_forced_blocks",
        Topology(2, 1, 16, 16, 64, 5, init_blocks=2, local_blocks=3),
        _packed(600),
        source="forced blocks fill top-k",
    ),
    Case("mha", _heads(4, 4, 64), _packed(150, 33), suite="smoke", source="kernels-community#1085"),
    Case("group_4_dim_96", _heads(8, 2, 96), _packed(130), source="tilelang-ascend#1669"),
    Case("group_16_dim_128", _heads(16, 1, 128, 128, 8), _packed(140)),
    Case("group_64_dim_64", _heads(64, 1, 64, topk=3), _packed(131), source="flash-attention#2623"),
    Case("dim_8_index_24", Topology(6, 2, 8, 24, 64, 2), _packed(200)),
    Case("minimax_m3", MINIMAX_M3, _packed(130, 70, 1), source="the model's own topology"),
)

PROBLEMS: tuple[Case, ...] = (*_DOCUMENTS, *_FRAGMENTS, *_NUMBERS, *_SELECTIONS, *_TOPOLOGIES)
"""Every named problem."""
