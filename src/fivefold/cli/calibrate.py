"""`fivefold calibrate`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli.options import Debug, Json, place
from fivefold.core.errors import UserError


class Device(StrEnum):
    """The kind of device to measure."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


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
        str | None,
        typer.Option(metavar="NAME", help="Chip whose table to start from, for a GPU without one.", show_default=False),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Correct by a finished run instead.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --from: what is corrected, such as a file.", show_default=False),
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure this machine, or the ranks of an allocation, for the planner.

    Example: fivefold calibrate --write mine.toml
    Example: srun fivefold calibrate --nodes --write cluster.toml
    Example: fivefold calibrate --from runs/demo --cluster mine.toml --write mine.toml
    """
    from fivefold.calibration.hardware_file import save
    from fivefold.report.table import Report, write

    report: Report[Any]
    if run is not None:
        if nodes:
            raise UserError("--from reads a run, and --nodes measures", fix="leave one out")
        from fivefold.calibration.learn import learn

        text, report = learn(run, base=cluster)
    elif cluster is not None:
        raise UserError("--cluster says what a run corrects", fix="name the run: --from RUN")
    else:
        from fivefold.calibration.calibrate import calibrate as measure

        measured = measure(device=device.value, nproc=nproc, chip=chip, nodes=nodes)
        if measured is None:
            return
        text, report = measured
    save(write_to, text)
    write(report, json=json)
    if json != "-":
        print(f"written: {write_to}\nnext: fivefold plan MODEL --cluster {write_to}")
