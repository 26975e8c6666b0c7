"""`fivefold data`."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug, Json
from fivefold.cli.train import split_arguments
from fivefold.core.errors import UserError

if TYPE_CHECKING:
    from fivefold.config import RunConfig
    from fivefold.data.ahead import Ahead
    from fivefold.report.table import Report


def data(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml key=value", help="A run file (none: the demo's), and keys to set.", show_default=False
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show, in the order of training.")] = 2,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Tokenise ahead of the run; what is done already is kept.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --prepare: processes. Default: one for each core.", show_default=False),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="With --prepare: only share I of N, from 0, as a job of an array.", show_default=False
        ),
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Show rows as the model will see them, and which tokens are trained.

    The run finds these tokens in the cache.

    Examples: fivefold data run.yaml data.train.path=chat.jsonl --rows 3    fivefold data run.yaml --prepare --workers 8
    """
    path, overrides = split_arguments(arguments or [])
    from fivefold.config import load_config
    from fivefold.report.table import write

    config = load_config(path, overrides)
    if prepare:
        write(_prepared(config, workers, shard), json=json)
        return
    if workers or shard is not None:
        raise UserError(
            f"{'--workers' if workers else '--shard'} is of --prepare", fix="fivefold data RUN.yaml --prepare ..."
        )
    from fivefold.data import prepare as prepare_data
    from fivefold.data.shown import examine

    write(examine(prepare_data(config), rows), json=json)


@dataclass(frozen=True)
class _Line:
    """One source in the table of `--prepare`."""

    source: str
    units: str
    documents: str
    tokens: str


def _prepared(config: "RunConfig", workers: int | None, shard: str | None) -> "Report[_Line]":
    """Tokenise ahead, and report it."""
    from fivefold.data.ahead import parse_shard, prepare_ahead
    from fivefold.report.table import Report
    from fivefold.training.launch import preparing

    share = None if shard is None else parse_shard(shard)
    with preparing() as progress:
        ahead = prepare_ahead(config, workers=workers, shard=share, progress=progress)
    lines = tuple(
        _Line(one.source, f"{one.done:,} of {one.units:,}", f"{one.documents:,}", f"{one.tokens:,}")
        for one in ahead.sources
    )
    details = {
        "sources": [asdict(one) for one in ahead.sources],
        "units_tokenised": ahead.tokenised,
        "bytes_tokenised": ahead.size,
        "seconds": ahead.seconds,
        "units_left": ahead.left,
        "train_rows": None if ahead.data is None or config.data.streaming else len(ahead.data.whole),
    }
    return Report(
        title="prepared", rows=lines, ok=True, closing=_closing(ahead, streaming=config.data.streaming), details=details
    )


def _closing(ahead: "Ahead", *, streaming: bool) -> str:
    from fivefold.core.units import many

    speed = ahead.size / 1e6 / ahead.seconds
    said = f"{many(ahead.tokenised, 'unit')} tokenised here, {ahead.size / 1e6:,.1f} MB of text"
    said += f", in {ahead.seconds:,.1f} s ({speed:.2f} MB/s)" if ahead.tokenised else ""
    if streaming:
        left = f"{many(ahead.left, 'unit')} not yet done: the run tokenises them while training" * bool(ahead.left)
        return f"{said}. {left or 'All units are ready: the run packs them window by window'}."
    if ahead.data is None:
        return (
            f"{said}. {many(ahead.left, 'unit')} of other shards not yet done: the last shard joins them, and so does "
            "--prepare without --shard, which also does what is missing."
        )
    return f"{said}. Ready: {many(len(ahead.data.whole), 'row')} of {ahead.data.whole.seq_length:,} to train on."
