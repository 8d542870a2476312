"""Verification of a user's program: some steps in one plain process and on ranks, compared tensor
by tensor.
"""

from bmtrain.verification.compare import Difference, Report
from bmtrain.verification.program import Program
from bmtrain.verification.trainer import Trainer
from bmtrain.verification.verify import verify

__all__ = ["Difference", "Program", "Report", "Trainer", "verify"]
