"""Silent bugs that shipped in good trainers, each as a small patch of the running program: one catalogue."""

from tests.verify.faults import loss, model, reduction, tensor
from tests.verify.faults.fault import FAULTS, Expected, Fault, Model

__all__ = ["FAULTS", "Expected", "Fault", "Model", "loss", "model", "reduction", "tensor"]
