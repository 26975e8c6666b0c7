"""Silent bugs of trainers, each as a small patch of the running program: one catalogue."""

from tests.verification.faults import (
    checkpoint,
    chunks,
    context,
    experts,
    fp8,
    loss,
    model,
    optimizer,
    pipeline,
    preference,
    proof,
    recompute,
    reduction,
    run,
    states,
    tensor,
)
from tests.verification.faults.fault import FAULTS, Expected, Fault, Model

__all__ = [
    "FAULTS",
    "Expected",
    "Fault",
    "Model",
    "checkpoint",
    "chunks",
    "context",
    "experts",
    "fp8",
    "loss",
    "model",
    "optimizer",
    "pipeline",
    "preference",
    "proof",
    "recompute",
    "reduction",
    "run",
    "states",
    "tensor",
]
