"""`fivefold evaluate` on one rank: open the model, distribute it, and measure."""

from collections.abc import Mapping
from typing import Any

from fivefold.evaluation import EvaluateRequest
from fivefold.evaluation.harness import evaluate_tasks
from fivefold.evaluation.perplexity import evaluate_text
from fivefold.evaluation.report import EvaluateReport
from fivefold.generation.opened import open_model
from fivefold.launch.once import as_worker
from fivefold.launch.world import World
from fivefold.parallel.state import state_of


def evaluate(request: EvaluateRequest, world: World) -> EvaluateReport:
    """Evaluate over a joined world; every rank calls it. The results of tasks are on the first rank."""
    opened = open_model(
        request.model, world, layout=request.layout, step=request.step, verb="evaluate", converses=request.chat
    )
    text = evaluate_text(opened, request, world) if request.text is not None or not request.tasks else None
    tasks, versions = evaluate_tasks(opened, request, world) if request.tasks else ([], {})
    layout = str(state_of(opened.model).plan.layout)
    return EvaluateReport(model=request.model, layout=layout, text=text, tasks=tuple(tasks), versions=versions)


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Run `evaluate` and return the report as JSON values."""
    return evaluate(EvaluateRequest(**request["evaluate"]), world).values


on_worker = as_worker(on_rank)
