"""Evaluations of a run between its steps, and the best of them, which retention and an early stop go by."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from fivefold.core.best import Best
from fivefold.data.rows import PackedRows
from fivefold.training import metrics
from fivefold.training.display import Line
from fivefold.training.part import LiveRun, Part
from fivefold.training.preference import mean_over_pairs
from fivefold.training.step import mean_loss


class Evaluation(Part):
    """Evaluates every `eval.every` steps on the validation rows, and adds what it finds to the step's row."""

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        if run.due(run.config.eval.every) and run.data.validation:
            run.progress.last_eval, more = self.measure(run, run.data.validation)
            row |= metrics.of_evaluation(run.progress.last_eval, more)

    def measure(self, run: LiveRun, rows: PackedRows) -> tuple[float, Mapping[str, float]]:
        """Mean cross entropy, nats per target token, over the first `eval.max_tokens` of `rows`, or mean of the user's
        own loss. For a preference objective the mean loss over the pairs there, and its metrics. Equal on all ranks."""
        if run.specs.validation:
            return mean_over_pairs(run.model, run.evaluation(rows), run.specs.validation)
        return mean_loss(run.model, run.evaluation(rows), run.specs.loss), {}

    def try_memory(self, run: LiveRun, more: int) -> None:
        if run.config.eval.every and run.data.validation:
            mean_loss(run.model, islice(run.evaluation(run.data.validation), 1), run.specs.loss)


class BestSteps(Part):
    """Ranks the evaluated steps by `eval.metric`: the best are saved, and the run stops early after `eval.stop`."""

    def __init__(self) -> None:
        self._told = ""

    def begin(self, run: LiveRun) -> None:
        options = run.config.eval
        run.progress.best, self._told = Best.resumed(run.resumed.state, options.metric, options.direction)

    def lines(self, run: LiveRun) -> Sequence[Line]:
        return [("best", self._told)] if self._told else []

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        """Compare this evaluation with those before, and add the best one to `row`."""
        if not run.due(run.config.eval.every):
            return
        best = run.progress.best
        best = best.after(run.step, row.get(best.metric), min_delta=run.config.eval.stop.min_delta)
        run.progress.best = best
        if best.step is not None:
            row |= {"eval/best": best.value, "eval/best_step": best.step}
        if "eval/loss" in row and run.progress.last_eval is not None:
            run.log.display.evaluated(run.step, run.progress.last_eval, best)

    def saves(self, run: LiveRun) -> bool:
        kept = run.progress.best.steps[: run.config.checkpoint.keep_best]
        return run.due(run.config.eval.every) and run.step in kept

    def why_over(self, run: LiveRun) -> str:
        best, stop = run.progress.best, run.config.eval.stop
        return best.why_over(run.step, stop.min_delta) if best.is_over(stop.patience) else ""
