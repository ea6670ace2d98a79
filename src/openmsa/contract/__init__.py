"""What flows between the stages: frozen records of torch tensors, importable with torch alone."""

from openmsa.contract.documents import Documents
from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Problem, Saved, SelectionConfig
from openmsa.contract.selection import Selection
from openmsa.contract.tasks import BackwardTasks
from openmsa.contract.topology import MINIMAX_M3, Topology

__all__ = [
    "MINIMAX_M3",
    "AttentionConfig",
    "BackwardTasks",
    "Documents",
    "KeySchedule",
    "Layout",
    "Problem",
    "Saved",
    "Selection",
    "SelectionConfig",
    "Topology",
]
