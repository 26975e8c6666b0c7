"""`fivefold calibrate` and `doctor`: what a machine has, and how fast it is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli.options import Debug, Device, Json, place
from fivefold.core.errors import UserError
from fivefold.core.files import put
from fivefold.report.findings import Report, write


def calibrate(
    write_to: Annotated[
        str, typer.Option("--write", metavar="FILE", help="The hardware file, for plan --cluster FILE.", callback=place)
    ] = "hardware.toml",
    device: Annotated[Device, typer.Option(help="Devices to measure; auto: GPUs where there are any.")] = Device.AUTO,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Workers at once.", show_default="one for each GPU or core")
    ] = None,
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="Every rank of an allocation, under torchrun or srun."),
    ] = False,
    chip: Annotated[
        str | None, typer.Option(metavar="NAME", help="Chip whose table to start from, for a GPU without one.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Correct by a finished run instead.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --from: what is corrected, such as a file.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure this machine, or the ranks of an allocation, for the planner.

    Example: fivefold calibrate --write mine.toml
    Example: srun fivefold calibrate --nodes --write cluster.toml
    Example: fivefold calibrate --from runs/demo --cluster mine.toml --write mine.toml
    """
    report: Report[Any]
    if run is not None:
        if nodes:
            raise UserError("--from reads a run, and --nodes measures", fix="leave one out")
        from fivefold.calibration.learn import learn

        text, report = learn(run, base=cluster)
    elif cluster is not None:
        raise UserError("--cluster says what a run corrects", fix="name the run: --from RUN")
    else:
        from fivefold.calibration import calibrate

        measured = calibrate(device=device.value, nproc=nproc, chip=chip, nodes=nodes)
        if measured is None:
            return
        text, report = measured
    put(Path(write_to), text.encode(), instead="name another file: --write FILE")
    write(report, json=json)
    if json != "-":
        print(f"written: {write_to}\nnext: fivefold plan MODEL --cluster {write_to}")


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model instead: the plan of one rank.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With MODEL: its layout, such as shard64.tp8.", show_default="single"),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="With MODEL: of which rank.")] = 0,
    seq_length: Annotated[int, typer.Option(min=1, help="With MODEL: tokens of a row.")] = 4096,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Every rank of an allocation instead, under torchrun, srun or --nproc.")
    ] = False,
    nproc: Annotated[int | None, typer.Option(min=1, help="With --nodes: workers on this machine.")] = None,
    device: Annotated[str, typer.Option(help="With --nodes: auto, cpu or cuda.")] = "auto",
    cluster: Annotated[
        str, typer.Option(metavar="TEXT", help="With --nodes: what links to expect, such as 2x8xH100@p5.")
    ] = "",
    file: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="With --nodes: a file or folder that ranks must share.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Look at this machine, a model, a rank of a layout, or every node of a cluster.

    Example: fivefold doctor llama-3.1-8b --layout shard4.tp2 --rank 5
    Example: srun fivefold doctor --nodes --file run.yaml
    """
    if nodes:
        if model is not None:
            raise UserError("--nodes looks at ranks, not at a model", fix=f"leave {model} out")
        from fivefold.doctor.nodes import examine_nodes

        seen = examine_nodes(nproc=nproc, device=device, layout=layout or "", cluster=cluster, files=file or ())
        if seen is None:
            return
        write(seen, json=json)
        if not seen.ok:
            raise typer.Exit(1)
        return
    if model is None and layout is not None:
        raise UserError("--layout needs a model", fix=f"fivefold doctor demo --layout {layout}, for example")
    if model is None:
        from fivefold.doctor.machine import examine_machine

        report: Report[Any] = examine_machine()
    else:
        from fivefold.doctor.model import examine_layout

        report = examine_layout(model, layout=layout or "single", rank=rank, seq_length=seq_length)
    write(report, json=json)
    if not report.ok:
        raise typer.Exit(1)
