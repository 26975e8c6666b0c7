"""What the ranks of the evaluation tests do."""

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from fivefold.evaluation import EvaluateRequest
from fivefold.evaluation.harness import log_probabilities
from fivefold.evaluation.run import evaluate
from fivefold.generation.opened import open_model
from fivefold.launch.world import World
from fivefold.verification.by_hand import exactly


def here() -> World:
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def measured(options: dict[str, Any]) -> dict[str, Any]:
    """Of a text."""
    with exactly("fp64") if "fp64" in options.get("layout", "") else nullcontext():
        found = evaluate(EvaluateRequest(**options), here()).text
    assert found is not None
    return {**vars(found), "loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}


def scored(folder: str, layout: str, pairs: Any) -> list[tuple[float, bool]]:
    with exactly("fp64"):
        opened = open_model(folder, here(), layout=layout, step=None, verb="evaluate")
        return log_probabilities(opened.model, pairs, batch_size=3)
