"""The named problems that every backend meets: ordinary ones and inputs that broke other libraries.

``source`` says where a problem comes from, mostly a public report. Sizes are as small as the
property allows, so that the dense float64 oracle stays cheap. A new input that broke something
belongs here.
"""

from __future__ import annotations

from openmsa.errors import invalid_input
from openmsa.testing.case import Case, Values
from openmsa.testing.topologies import ONE_GROUP, TOPOLOGIES, heads, packed

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


_TINY = heads(2, 1, topk=16)

_DOCUMENTS = (
    Case("one_token", heads(1, 1, topk=16), packed(1), suite="smoke", source="flash-attention#334"),
    Case("no_tokens", _TINY, packed(0, 0), suite="smoke", source="empty documents only"),
    Case("no_documents", _TINY, (0,), source="an empty batch"),
    Case(
        "ragged_lengths",
        heads(4, 2, 32, 128),
        packed(127, 129, 1, 2, 3, 5, 128),
        suite="smoke",
        source="lengths around a block and of a few tokens; microsoft/MInference#201",
    ),
    Case(
        "empty_documents_between",
        heads(4, 2, 16),
        packed(0, 128, 0, 0, 70, 0),
        suite="smoke",
        source="fla#103",
    ),
    Case("block_multiples", heads(2, 2, 16, 128), packed(128, 256), source="MInference#201"),
    Case("two_key_tail", heads(2, 1, 64, 128), packed(130), source="vllm-ascend#13391"),
    Case("off_grid_documents", heads(8, 2, 32, 128), packed(100, 156), source="flash-msa"),
    Case("packed_64_192", heads(8, 2, 32), packed(64, 192), source="TransformerEngine#3333"),
    Case(
        "more_blocks_than_topk",
        heads(1, 1, topk=16),
        packed(17 * 64 + 1),
        suite="smoke",
        source="ROCm/ATOM#1368",
    ),
    Case(
        "more_blocks_than_topk_128",
        heads(1, 1, 16, 128, 16),
        packed(17 * 128 + 1),
        source="ROCm/ATOM#1368",
    ),
    Case(
        "slack_rows",
        heads(4, 2, 32),
        packed(130, 65),
        select="random",
        slack=37,
        suite="smoke",
        source="tilelang#2461, flashinfer#5015",
    ),
)

_FRAGMENTS = (
    Case(
        "more_queries_than_keys",
        heads(4, 2, 16, 128),
        (0, 76, 110, 256),
        (0, 1, 2, 3),
        values=Values(logits=(3.0,), v=3.0),
        suite="smoke",
        source="flash-attention#443",
    ),
    Case(
        "zero_length_query_segments",
        heads(1, 1, 16, 128),
        (0, 0, 1208, 2048, 2048),
        (0, 2538, 4280, 5120, 8192),
        source="flash-attention#2562",
    ),
    Case(
        "segment_without_queries",
        heads(2, 1, 32, 128),
        (0, 0, 128),
        (0, 128, 256),
        suite="smoke",
        source="flash-attention#2421",
    ),
    Case(
        "segments_without_keys",
        heads(1, 1, 16, 128),
        (0, 0, 0, 1023),
        (0, 0, 1, 2046),
        source="flash-attention#1254",
    ),
    Case(
        "fragments_share_keys",
        heads(4, 2, 16, topk=2),
        (0, 64, 192, 224, 256),
        (0, 192, 320, 416, 480),
        (0, 0, 2, 2),
        suite="smoke",
        source="MiniMax-AI/MSA context-parallel fragments",
    ),
    Case(
        "fragment_end_cuts_own_block",
        heads(4, 2, 16, topk=3),
        (0, 84, 128, 200, 233, 234),
        (0, 134, 178, 300, 352, 353),
        (0, 0, 2, 2, 2),
        suite="smoke",
        source="MiniMax-AI/MSA context-parallel fragments",
    ),
    Case(
        "fragments_with_hot_block",
        heads(2, 1, 16, topk=2),
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
        heads(1, 1, 64, 128),
        packed(320),
        values=Values(logits=(3.0,), v=3.0),
        suite="smoke",
        source="flash-attention#1052, #1311",
    ),
    Case(
        "logits_x900",
        heads(2, 1, 32),
        packed(200),
        values=Values(logits=(30.0,)),
        source="softmax far beyond exp's range without a shift",
    ),
    Case(
        "loud_and_quiet_documents",
        heads(4, 2, 32),
        packed(150, 90, 70, 1),
        values=Values(logits=(30.0, 1.0)),
        suite="smoke",
        source="a loud document must not cost a quiet one its accuracy",
    ),
    Case(
        "very_negative_lse",
        heads(2, 2, 64, 128),
        (0, 1),
        (0, 128),
        values=Values(apart=11.2),
        suite="smoke",
        source="cudnn-frontend#1072",
    ),
    Case(
        "ascending_values",
        heads(2, 1, 16),
        packed(190),
        values=Values(ramp=True),
        source="native-sparse-attention#32",
    ),
    Case(
        "large_output_gradient",
        heads(2, 2, 32),
        packed(150),
        values=Values(d_out=4096.0),
        source="NeMo Automodel#3809",
    ),
)

_SELECTIONS = (
    Case("random_blocks", heads(4, 2, 16, topk=3), packed(300, 97), select="random"),
    Case("recent_blocks", heads(4, 2, 16, topk=2), packed(300, 97), select="recent"),
    Case(
        "hot_block",
        heads(4, 2, 16, topk=4),
        packed(520),
        select="hot",
        suite="smoke",
        source="cudnn-frontend#384, #385",
    ),
    Case("few_candidates", heads(4, 2, 16, topk=8), packed(300), select="few"),
    Case(
        "rows_without_block",
        heads(4, 2, 32, topk=4),
        packed(260, 66),
        select="gaps",
        suite="smoke",
        source="cudnn-frontend#676, vllm#49054",
    ),
    Case(
        "raw_ids",
        heads(4, 2, 16, topk=8),
        packed(260, 66),
        select="raw",
        slack=5,
        suite="smoke",
        source="cudnn-frontend#676, FastVideo#1243",
    ),
    Case(
        "equal_scores",
        heads(2, 2, 16, topk=3),
        packed(400),
        values=Values(index="equal"),
        suite="smoke",
        source="ties: the lower block id wins",
    ),
    Case(
        "tied_integer_scores",
        heads(2, 2, 4, 16, 3),
        packed(300, 41),
        values=Values(index="integers"),
        source="ties: the lower block id wins",
    ),
    Case(
        "nonfinite_scores",
        heads(2, 2, 4, 64, 3),
        packed(400),
        values=Values(index="nonfinite"),
        source="NaN ranks as -inf",
    ),
)

PROBLEMS: tuple[Case, ...] = (
    *_DOCUMENTS, *_FRAGMENTS, *_NUMBERS, *_SELECTIONS, *TOPOLOGIES, *ONE_GROUP,
)  # fmt: skip
"""Every named problem."""
