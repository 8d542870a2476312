"""Verification of a program: train a few steps in one process and on ranks, compare all tensors."""

from bmtrain.verification.compare import Difference, Report
from bmtrain.verification.program import Program, Trainer
from bmtrain.verification.verify import verify

__all__ = ["Difference", "Program", "Report", "Trainer", "verify"]
