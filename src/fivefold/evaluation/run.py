"""`fivefold evaluate` on one rank: open the model, distribute it, and measure: the tasks of `harness`, or the loss of a
text, computed by the same passes that evaluate a run during training.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.config import parse_config
from fivefold.core.cache import cache_root
from fivefold.core.errors import UserError
from fivefold.data import prepare
from fivefold.data.examples import Example, Preference, TokenIds
from fivefold.data.formats import discover
from fivefold.data.rows import PackedRows, RowPacking
from fivefold.data.source import FileList, Source, resolve
from fivefold.data.split import blocks_of, spans_of
from fivefold.data.store import store_for
from fivefold.evaluation import SEQ_LENGTH, EvaluateRequest
from fivefold.evaluation.harness import evaluate_tasks
from fivefold.evaluation.report import EvaluateReport, TextResult
from fivefold.generation.opened import OpenModel, check_vocabulary, open_model
from fivefold.launch.once import as_worker
from fivefold.launch.world import World
from fivefold.models.forwards import check_lengths
from fivefold.parallel.plain import check_alike, of_first
from fivefold.parallel.state import state_of
from fivefold.training.inputs import share_of
from fivefold.training.step import summed_loss


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


# ---- the loss of a text ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given(Source):
    """A source given by options of the command."""

    def named(self, key: str) -> str:
        return f"--{key.replace('_', '-')}"

    def option(self, key: str, value: str) -> str:
        return f"--{key.replace('_', '-')} {shlex.quote(value)}"


def evaluate_text(opened: OpenModel, request: EvaluateRequest, world: World) -> TextResult:
    """Compute the loss of `request.text`, or of the run's validation rows, over a joined world. Raises `UserError`."""
    files: FileList | None = None
    most = request.max_tokens
    if request.text is None:
        rows, most = _of_run(opened, request)
        name = "the validation rows of the run"
    else:
        source = _Given(request.text, "--text", request.format, request.text_key)
        files = resolve(source, discover(), cache_root())
        rows, name = rows_of(files, opened, _seq_length(opened, request)), files.name
    check_alike(lambda: {name: [store.meta.content for store in rows.stores]})
    check_lengths(opened.model.config, rows.seq_length)
    check_vocabulary(rows.largest_token, opened.model.config, opened.info, name)
    loss, targets = summed_loss(opened.model, rows.sequential(max_tokens=most, **share_of(opened.model)))
    read = rows.rows_within(most)
    whole = files is not None and read == len(rows) and not rows.counts.shortened
    size = of_first(text_bytes(files, opened) if whole and files and world.is_first else None)
    return TextResult(
        text=name, loss_sum=loss, targets=targets, tokens=int(rows.row_tokens[:read].sum()), rows=read,
        seq_length=rows.seq_length, text_bytes=size,
    )  # fmt: skip


def rows_of(files: FileList, opened: OpenModel, seq_length: int) -> PackedRows:
    """Pack all documents of a source into rows, as in training."""
    store = store_for(files, opened.info, cache_root())
    if store.meta.pairs:
        raise _of_pairs(f"--text: {files.name} holds")
    blocks = blocks_of([store])
    spans = spans_of(blocks, np.ones(len(blocks.hash), np.bool_))
    packing = RowPacking(seq_length, opened.info.eos_token_id)
    index, counts = packing.index([store], spans)
    if not len(index):
        raise UserError(f"--text: {files.name} has no token to predict", fix="name a longer text")
    return packing.rows(index, counts, (store,))


def text_bytes(files: FileList, opened: OpenModel) -> int | None:
    """Bytes, in UTF-8, of the trained text in a source's documents; None for tokens, which have no text."""
    if files.store:
        return None
    eos = opened.tokenizer.id_to_token(opened.info.eos_token_id) or ""
    size = 0
    for document in (document for path, form in files.files for document in form.documents(path, files.source)):
        if isinstance(document, TokenIds):
            return None
        size += _bytes(document, opened, eos)
    return size


def _of_pairs(what: str) -> UserError:
    return UserError(
        f"{what} pairs of answers, which have no perplexity",
        fix="name a text, or records of one answer each: --text FILE",
    )


def _bytes(document: str | Example | Preference, opened: OpenModel, eos: str) -> int:
    if isinstance(document, str):
        return len(document.encode())
    assert not isinstance(document, Preference), "refused with its store"
    text = document.rendered(opened.info.template, eos)
    return sum(len(text.text[first:last].encode()) for first, last in text.trained or ())


def _of_run(opened: OpenModel, request: EvaluateRequest) -> tuple[PackedRows, int | None]:
    """Validation rows of the model's run, and the most tokens to read of them."""
    run = opened.folder.parent / "run.yaml"
    if not opened.run:
        raise UserError(f"{request.model} is no run, so it has no validation rows", fix="name a text: --text FILE")
    config = parse_config(run.read_text(encoding="utf-8"))
    if request.seq_length is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"seq_length": request.seq_length})})
    if config.objective.has_answers:
        raise _of_pairs(f"{request.model} trains by objective.name {config.objective.name}: its validation rows are")
    data = prepare(config)
    if data.validation is None:
        raise UserError(f"{request.model} holds out no text (data.validation)", fix="name a text: --text FILE")
    return data.validation, request.max_tokens or config.eval.max_tokens


def _seq_length(opened: OpenModel, request: EvaluateRequest) -> int:
    """Tokens of a row. Raises `UserError` if they exceed the model's positions."""
    most = getattr(opened.model.config.get_text_config(), "max_position_embeddings", None)
    if request.seq_length is None:
        own = (opened.run.get("data") or {}).get("seq_length")
        return own if isinstance(own, int) else min(SEQ_LENGTH, most or SEQ_LENGTH)
    if most and request.seq_length > most:
        raise UserError(
            f"--seq-length {request.seq_length} is more than the model's max_position_embeddings {most}",
            fix=f"--seq-length {most}, or less",
        )
    return request.seq_length
