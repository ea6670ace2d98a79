"""Public test kit: named problems, the yardstick, poisoned memory, and a whole backend's check.

Needs torch only. To hold your own integration to the library's standard::

    from openmsa.testing import attention_truth, assert_ok, problems

    for case in problems("smoke"):
        docs = case.documents()
        inputs = case.inputs(torch.bfloat16)
        selection = case.selection(inputs, docs)
        truth = attention_truth(inputs, selection.indices, docs, selection.block_size)
        assert_ok(truth.quantities["out"].compare(my_attention(inputs, selection, docs)))
"""

from openmsa.testing.case import STRATEGIES, Case, Inputs, Values
from openmsa.testing.compare import (
    Report,
    assert_exact,
    assert_ok,
    assert_within,
    compare,
    compare_exact,
    compare_selection,
    rounding,
    unit_roundoff,
)
from openmsa.testing.oracle import AttentionTruth, Truth, attention_truth
from openmsa.testing.poison import poison, poisoned_memory
from openmsa.testing.problems import PROBLEMS, SUITES, problem, problems
from openmsa.testing.selection_oracle import SelectionTruth, selection_truth
from openmsa.testing.verify import verify, verify_case

__all__ = [
    "PROBLEMS",
    "STRATEGIES",
    "SUITES",
    "AttentionTruth",
    "Case",
    "Inputs",
    "Report",
    "SelectionTruth",
    "Truth",
    "Values",
    "assert_exact",
    "assert_ok",
    "assert_within",
    "attention_truth",
    "compare",
    "compare_exact",
    "compare_selection",
    "poison",
    "poisoned_memory",
    "problem",
    "problems",
    "rounding",
    "selection_truth",
    "unit_roundoff",
    "verify",
    "verify_case",
]
