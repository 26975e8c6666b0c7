"""`fivefold train`, `launch`, `data` and `convert`: a run file, and what becomes of it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug, Json, RunArguments, place
from fivefold.config import RunConfig, keys, load_config
from fivefold.config.key import json_schema_of
from fivefold.core.errors import UserError
from fivefold.core.streams import unseen_if_need_be
from fivefold.core.text import say
from fivefold.core.units import many
from fivefold.jobs.engines import names
from fivefold.jobs.launch import JobRequest, save, submit_file, written
from fivefold.launch.torchrun import find_hosts, set_for_hosts, torchrun_command
from fivefold.launch.world import find_world
from fivefold.report.findings import Report, write

if TYPE_CHECKING:
    from fivefold.data.ahead import Ahead
    from fivefold.data.shown import DataReport

_COLUMNS = 80  # width of the list of keys


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml key=value",
            help="A run file, or a run folder to go on with (none: the built-in demo), and keys to set on top of it.",
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Workers to start. Default: every GPU, or 2 on CPU.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="First prove the layout on a thin model; see fivefold verify.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every key of the run file, and stop.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the run file, for editors, and stop.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a model: the run file's, or the built-in demo.

    Examples: fivefold train    fivefold train run.yaml train.max_steps=100 layout=shard2.tp2
    """
    if keys or schema:
        print_keys() if keys else print_schema()
        return
    path, overrides = split_arguments(arguments or [])
    flags = [*(["--verify"] if verify else []), *(["--debug"] if debug else [])]
    _become_torchrun([*(arguments or []), *flags], nproc)
    from fivefold.training.launch import run
    from fivefold.verification import before_training

    with unseen_if_need_be():
        run(path, overrides, nproc=nproc, prove=before_training if verify else None)


def _become_torchrun(arguments: list[str], nproc: int | None) -> None:
    """Replace this process by a torchrun if SageMaker has started it on each of several hosts. What keeps its id keeps
    getting the signals."""

    hosts = find_hosts() if find_world("cpu") is None else None
    if hosts:
        set_for_hosts(hosts)
        command = torchrun_command(hosts, arguments, nproc)
        os.execv(command[0], command)


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Split arguments into the run file or folder, if the first one is that, and overrides. Raises `UserError`."""
    is_file = bool(arguments) and ("=" not in arguments[0] or Path(arguments[0]).exists())
    path = Path(arguments[0]) if is_file else None
    overrides = arguments[1:] if path else arguments
    for override in overrides:
        if "=" not in override:
            raise UserError(
                f"{override} is neither the run file, which comes first, nor key=value",
                fix="fivefold train RUN.yaml key=value ...",
                more="fivefold train --help",
            )
    return path, overrides


def print_keys() -> None:
    for key in keys():
        default = "" if key.default is None else f"  [{_plain(key.default)}]"
        choices = "  " + " | ".join(map(_plain, key.choices)) if key.choices else ""
        print(fill(f"{key.name}{default}{choices}", width=_COLUMNS, subsequent_indent=" " * 8))
        print(fill(key.help, width=_COLUMNS, initial_indent="    ", subsequent_indent="    "))


def print_schema() -> None:
    print(json.dumps(json_schema_of(RunConfig), indent=2, ensure_ascii=False))


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(getattr(item, "path", str(item)) for item in value) or "none"
    return str(value)


def launch(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RUN.yaml key=value", help="A run file, and keys to set on top of it."),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="ENGINE", help=f"The engine that starts it: {', '.join(names())}.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    devices: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each, or ranks on a CPU.", show_default="8; on a CPU 2")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="The most that it may take, such as 12h.")] = None,
    image: Annotated[str, typer.Option(metavar="NAME", help="Container image that has fivefold in it.")] = "",
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the file instead of printing it.", callback=place)
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit it too. The file is kept.")] = False,
    debug: Debug = False,
) -> None:
    """Write the job of a run for a cluster: a small file to read, change and submit.

    Example: fivefold launch run.yaml --to slurm --nodes 2 --output run.sbatch
    """
    run, overrides = split_arguments(arguments)
    if run is None:
        raise UserError(
            f"{arguments[0]} is no run file, which comes first", fix="fivefold launch RUN.yaml key=value ..."
        )

    request = JobRequest(run=run, to=to, overrides=overrides, nodes=nodes, devices=devices, time=time, image=image)
    engine, text, usual = written(request)
    if not (output or submit):
        print(text, end="")
        return
    file = Path(output) if output else usual
    save(engine, file, text)
    command = join(engine.submit(file))
    say(f"wrote {file}, {engine.title}" + ("" if submit else f"; submit it with: {command}"))
    if submit:
        say(submit_file(engine, file))


def data(
    arguments: RunArguments = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show, in the order of training.")] = 2,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Tokenise ahead of the run; what is done already is kept.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --prepare: processes. Default: one for each core.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="With --prepare: only share I of N, from 0, as a job of an array.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Show rows as the model will see them, and which tokens are trained.

    The run finds these tokens in the cache.

    Examples: fivefold data run.yaml data.train.path=chat.jsonl --rows 3    fivefold data run.yaml --prepare --workers 8
    """
    path, overrides = split_arguments(arguments or [])

    config = load_config(path, overrides)
    if prepare:
        write(_prepared(config, workers, shard), json=json)
        return
    if workers or shard is not None:
        raise UserError(
            f"{'--workers' if workers else '--shard'} is of --prepare", fix="fivefold data RUN.yaml --prepare ..."
        )
    write(_shown(config, rows), json=json)


def _shown(config: RunConfig, rows: int) -> "DataReport":
    from fivefold.data import prepare
    from fivefold.data.shown import examine

    return examine(prepare(config), rows)


@dataclass(frozen=True)
class _Line:
    """One source in the table of `--prepare`."""

    source: str
    units: str
    documents: str
    tokens: str


def _prepared(config: RunConfig, workers: int | None, shard: str | None) -> Report[_Line]:
    from fivefold.data.ahead import parse_shard, prepare_ahead
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


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A config of axolotl, LLaMA-Factory or TRL.")],
    devices: Annotated[int, typer.Option(min=1, help="Devices of the config: batches are of all of them.")] = 1,
    debug: Debug = False,
) -> None:
    """Print a config of axolotl, LLaMA-Factory or TRL as a run file.

    Comments name changed keys beside their lines, and keys without a counterpart at the head. Others are refused.

    Example: fivefold convert axolotl.yml --devices 8 > run.yaml
    """
    from fivefold.convert import convert

    say(str(convert(file, devices=devices)).rstrip("\n"))
