"""Evaluations of a run between its steps; the best of them, which retention and an early stop go by; and samples: texts
that it continues, and conversations that it answers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fivefold import checkpoint
from fivefold.config import RunConfig
from fivefold.core.best import Best
from fivefold.core.errors import UserError
from fivefold.data.prepare import PreparedData
from fivefold.data.rows import PackedRows
from fivefold.generation.opened import OpenModel
from fivefold.generation.prompts import Prompt, prompt_of, read_records
from fivefold.generation.text import pieces
from fivefold.training.display import Line, Sample
from fivefold.training.part import LiveRun, Part, finite
from fivefold.training.preference import mean_over_pairs
from fivefold.training.step import mean_loss


class Evaluation(Part):
    """Evaluates every `eval.every` steps on the validation rows, and adds what it finds to the step's row."""

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        if run.due(run.config.eval.every) and run.data.validation:
            run.progress.last_eval, more = self.measure(run, run.data.validation)
            row |= of_evaluation(run.progress.last_eval, more)

    def measure(self, run: LiveRun, rows: PackedRows) -> tuple[float, Mapping[str, float]]:
        """Mean cross entropy, nats per target token, over the first `eval.max_tokens` of `rows`, or mean of the user's
        own loss. For a preference objective the mean loss over the pairs there, and its metrics. Equal on all ranks."""
        if run.specs.validation:
            return mean_over_pairs(run.model, run.evaluation(rows), run.specs.validation)
        return mean_loss(run.model, run.evaluation(rows), run.specs.loss), {}

    def try_memory(self, run: LiveRun, more: int) -> None:
        if run.config.eval.every and run.data.validation:
            mean_loss(run.model, islice(run.evaluation(run.data.validation), 1), run.specs.loss)


def of_evaluation(loss: float, more: Mapping[str, float]) -> dict[str, Any]:
    """The part of a row that an evaluation adds. `more`: metrics of a preference objective."""
    return {"eval/loss": finite(loss), **{f"eval/{name}": finite(number) for name, number in more.items()}}


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


# ---- samples ---------------------------------------------------------------------------------------------------------

OF_FILE = 16  # records of `sample.file` that are answered
DRAWING = {"temperature": 0.7, "top_k": 40}


class Samples(Part):
    """The prompts of a run's samples, as tokens. Every rank has them, and makes the same calls."""

    def __init__(self, config: RunConfig, model: Any, data: PreparedData) -> None:
        """Read the prompts; every rank calls this. Raises `UserError`, before the first step, for one that the chat
        template does not take, or a file that cannot be read."""
        self._options: dict[str, Any] = {**DRAWING, "seed": config.train.seed}
        self._options |= {"max_new_tokens": config.sample.max_new_tokens}
        self._prompts: list[Prompt] = []
        if config.sample.is_on:
            info = data.tokenizer
            self._opened = OpenModel(info.folder, model, info.load(), info, (info.eos_token_id,), {})
            records = checkpoint.on_first_rank(lambda: list(_records(config)))
            self._prompts = [prompt_of(self._opened, record, where) for record, where in records]

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        if run.due(run.config.sample.every):
            run.log.sampled(list(self.draw(run.step)))

    def draw(self, step: int) -> Iterator[Sample]:
        """Write on from each prompt; every rank consumes all samples."""
        for prompt in self._prompts:
            ids, turns = torch.tensor([prompt.ids]), prompt.given.get("messages", ())
            written = pieces(
                self._opened.model, self._opened.tokenizer, ids, prompt.ends, stop=prompt.stop, **self._options
            )
            yield Sample(step, as_text(turns) or prompt.given["prompt"], "".join(written), turns)


def as_text(turns: Sequence[Mapping[str, Any]]) -> str:
    """A conversation for people, up to the beginning of the answer; "" without turns."""
    lines = [f"{turn.get('role')}: {turn.get('content') or ''}\n" for turn in turns]
    return "".join([*lines, "assistant: "]) if lines else ""


def _records(config: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """The records of all prompts, and the place of each: texts, conversations, those of a file."""
    sample = config.sample
    yield from (({"prompt": text}, f"sample.prompts[{at}]") for at, text in enumerate(sample.prompts))
    yield from (({"messages": list(turns)}, f"sample.messages[{at}]") for at, turns in enumerate(sample.messages))
    if sample.file:
        try:
            yield from islice(read_records(Path(sample.file)), OF_FILE)
        except (OSError, UnicodeDecodeError) as error:
            what = f"sample.file {sample.file} cannot be read: {getattr(error, 'strerror', None) or error}"
            raise UserError(what, fix="name a .jsonl of prompt or messages, or a text with a prompt a line") from error
