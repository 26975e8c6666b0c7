"""`fivefold plan`."""

from typing import Annotated

import typer

from fivefold.cli.options import Debug, Html, Json, place
from fivefold.core.errors import UserError


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
        str | None, typer.Option(metavar="TEXT", help="Estimate this one too, such as shard8.tp8.", show_default=False)
    ] = None,
    max_seq_length: Annotated[
        bool, typer.Option("--max-seq-length", help="The longest rows that fit instead.")
    ] = False,
    fewest_devices: Annotated[
        bool, typer.Option("--fewest-devices", help="On as few devices of the cluster as can train it.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            metavar="X",
            help="Price of a device for an hour: adds what tokens cost.",
            show_default=False,
        ),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=1e9,
            metavar="HOURS",
            help="Mean time between failures of one device: adds checkpoint interval, restart time and goodput.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10,
    write_to: Annotated[
        str | None,
        typer.Option(
            "--write", metavar="FILE", help="Write a run file of the first.", show_default=False, callback=place
        ),
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Find the layout for a cluster, with its memory and time, before anything runs.

    Example: fivefold plan llama-3.1-70b --cluster 8x8xH100 --seq-length 8k --global-batch-size 256
    """
    from dataclasses import replace

    from fivefold.core.units import parse_length
    from fivefold.hardware.cluster import Cluster
    from fivefold.planner import plan as planner
    from fivefold.planner.estimate import Workload
    from fivefold.report.table import write_with_page

    rows = global_batch_size or 4 * Cluster.parse(cluster).world
    try:
        workload = Workload(parse_length(seq_length), rows)
    except ValueError:
        raise UserError(f"--seq-length {seq_length} is no number of tokens", fix="write 8192, or 8k") from None
    if fewest_devices and (max_seq_length or layout):
        raise UserError("--fewest-devices asks for layouts itself", fix="leave --layout and --max-seq-length out")
    if max_seq_length:
        report = planner.longest(model, cluster, workload, layout=layout)
    elif fewest_devices:
        report = planner.fewest(model, cluster, workload, top=top)
    else:
        report = planner.planned(model, cluster, workload, layout=layout, top=top)
    if price is not None:
        report = planner.priced(report, price)
    if mtbf is not None:
        report = planner.with_failures(report, model, mtbf)
    if write_to:
        first = report.estimates[0]
        cost = report.failures.get(first.layout)
        planner.write_run_file(write_to, model, first, every=cost.every if cost else None)
        wrote = (
            f"wrote {write_to} with {report.rows[0].layout}: {planner.to_add(model)}; then fivefold train {write_to}"
        )
        lines = filter(None, (wrote, planner.without_weights(model, write_to)))
        report = replace(report, closing="\n".join((report.closing, *lines)))
    write_with_page(report, json=json, html=html)
    if not report.ok:
        raise typer.Exit(1)
