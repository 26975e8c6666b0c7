"""`fivefold plan`, `verify`, `rehearse` and `compare`: layouts before a run trusts them."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug, Html, Json, RunArguments, place
from fivefold.cli.train import split_arguments
from fivefold.core.errors import UserError
from fivefold.core.units import parse_length
from fivefold.hardware.cluster import Cluster
from fivefold.report.findings import write

if TYPE_CHECKING:
    from fivefold.comparison.report import CompareReport
    from fivefold.verification.report import VerifyReport


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A shape, a Hugging Face folder, its config, a hub id.")
    ],
    cluster: Annotated[str, typer.Option(metavar="TEXT", help="Such as 16x8xH100, 8xA100-40, or a TOML file.")],
    seq_length: Annotated[str, typer.Option(metavar="N", help="Tokens of a row, such as 8k.")] = "4096",
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step.", show_default="4 a device")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Estimate this one too, such as shard8.tp8.")
    ] = None,
    max_seq_length: Annotated[
        bool, typer.Option("--max-seq-length", help="The longest rows that fit instead.")
    ] = False,
    fewest_devices: Annotated[
        bool, typer.Option("--fewest-devices", help="On as few devices of the cluster as can train it.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, metavar="X", help="Price of a device for an hour: adds what tokens cost."),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=1e9,
            metavar="HOURS",
            help="Mean time between failures of one device: adds checkpoint interval, restart time and goodput.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10,
    write_to: Annotated[
        str | None, typer.Option("--write", metavar="FILE", help="Write a run file of the first.", callback=place)
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Find the layout for a cluster, with its memory and time, before anything runs.

    Example: fivefold plan llama-3.1-70b --cluster 8x8xH100 --seq-length 8k --global-batch-size 256
    """
    from fivefold.planner import plan
    from fivefold.planner.estimate import Workload

    rows = global_batch_size or 4 * Cluster.parse(cluster).world
    try:
        workload = Workload(parse_length(seq_length), rows)
    except ValueError:
        raise UserError(f"--seq-length {seq_length} is no number of tokens", fix="write 8192, or 8k") from None
    if fewest_devices and (max_seq_length or layout):
        raise UserError("--fewest-devices asks for layouts itself", fix="leave --layout and --max-seq-length out")
    if max_seq_length:
        report = plan.longest(model, cluster, workload, layout=layout)
    elif fewest_devices:
        report = plan.fewest(model, cluster, workload, top=top)
    else:
        report = plan.planned(model, cluster, workload, layout=layout, top=top)
    if price is not None:
        report = plan.priced(report, price)
    if mtbf is not None:
        report = plan.with_failures(report, model, mtbf)
    if write_to:
        first = report.estimates[0]
        cost = report.failures.get(first.layout)
        plan.write_run_file(write_to, model, first, every=cost.every if cost else None)
        wrote = f"wrote {write_to} with {report.rows[0].layout}: {plan.to_add(model)}; then fivefold train {write_to}"
        lines = filter(None, (wrote, plan.without_weights(model, write_to)))
        report = replace(report, closing="\n".join((report.closing, *lines)))
    write(report, json=json, html=html)
    if not report.ok:
        raise typer.Exit(1)


class Precision(StrEnum):
    """The precision of a layout whose text does not state one."""

    FP64, FP32, BF16, RUN = "fp64", "fp32", "bf16", "run"


def verify(
    arguments: RunArguments = None,
    layouts: Annotated[str, typer.Option(help="Layouts to prove, such as tp2,shard2.tp2+zero1.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A thin model and few steps: seconds.")] = False,
    thin: Annotated[bool, typer.Option("--thin", help="A layer of each kind, and narrow ones.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train.", show_default="20; quick: 5")] = None,
    precision: Annotated[Precision, typer.Option(help="fp64 proves; run: as the run file says.")] = Precision.FP64,
    seq_length: Annotated[int | None, typer.Option(min=8, help="Tokens per row.", show_default="61")] = None,
    seed: Annotated[int, typer.Option(help="Fixes weights and documents.")] = 1234,
    rows: Annotated[bool, typer.Option("--rows", help="Show each kind of comparison.")] = False,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Prove that layouts compute what one process computes, or name what differs.

    Example: fivefold verify --quick --layouts tp2,shard2,shard2.tp2
    """
    path, overrides = split_arguments(arguments or [])
    from fivefold.verification import main

    def publish(report: "VerifyReport") -> None:
        write(replace(report, shows_all=rows), json=json, html=html)

    report = main(
        path, overrides, layouts=[text.strip() for text in layouts.split(",") if text.strip()], thin=thin, quick=quick,
        steps=steps, precision=precision.value, seq_length=seq_length, seed=seed, quiet=json == "-", publish=publish,
    )  # fmt: skip
    if not report.ok:
        raise typer.Exit(1)


class Ranks(StrEnum):
    """Sets of ranks to rehearse, instead of one by its number."""

    ALL_KINDS = "all-kinds"


def rehearse(
    arguments: RunArguments = None,
    cluster: Annotated[str, typer.Option(metavar="TEXT", help="Cluster that it would run on, such as 16x8xH100.")] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Rank to rehearse.", show_default="0")] = None,
    ranks: Annotated[Ranks | None, typer.Option(help="One of each kind: first, middle and last of a pipeline.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random documents in place of data.train, and no tokenizer.")
    ] = False,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Run the real step of any rank of a cluster, without its devices: does it fit?

    Example: fivefold rehearse run.yaml --cluster 16x8xH100 --ranks all-kinds
    """
    if not cluster:
        raise UserError("rehearse needs a cluster", fix="fivefold rehearse RUN.yaml --cluster 8xH100")
    if rank is not None and ranks is not None:
        raise UserError("--rank and --ranks exclude each other", fix="leave one of them out")
    path, overrides = split_arguments(arguments or [])
    from fivefold.rehearsal.launch import rehearse

    found = rehearse(
        path, overrides, cluster=cluster, rank=rank, all_kinds=ranks is not None, steps=steps, synthetic=synthetic,
        quiet=not debug,
    )  # fmt: skip
    write(found, json=json, html=html)
    if not found.ok:
        raise typer.Exit(1)


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml ... key=value", help="Run files (none: the demo's), and keys to set in all of them."
        ),
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="The run file once more, with this set. Repeat it.")
    ] = None,
    nproc: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of devices, such as 1,2,4.", show_default="as fivefold train")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, each with another seed.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run.", show_default="the run file's")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps after a start that are not timed.")] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs.", show_default="runs/compare-...")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="LOG", help="Another trainer's log, or a run folder. Repeat it.")
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Train configurations by turns: a table of throughput, scaling and loss.

    Example: fivefold compare run.yaml --vary precision.fp8=rowwise --nproc 1,2 --steps 50
    """
    from fivefold.comparison import Request, main
    from fivefold.comparison.configurations import words

    given = arguments or []
    files = [word for word in given if "=" not in word or Path(word).exists()]

    def publish(report: "CompareReport") -> None:
        write(report, json=json, html=html)

    request = Request(
        paths=[Path(file) for file in files], overrides=[word for word in given if word not in files],
        vary=[words(text) for text in vary or ()], nproc=_counts(nproc), repeats=repeats, steps=steps, warmup=warmup,
        out=out, against=against or [],
    )  # fmt: skip
    if not main(request, publish, quiet=json == "-").ok:
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    """Parse `1,2,4` to sorted, distinct numbers. Raises `UserError`."""
    try:
        counts = sorted({int(word) for word in text.split(",")} if text else ())
        if counts and counts[0] < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"--nproc {text} is no list of numbers of devices", fix="--nproc 1,2,4") from None
    return counts
