"""`fivefold calibrate`."""

from enum import StrEnum
from typing import Annotated

import typer

from fivefold.cli.options import Debug


class Device(StrEnum):
    """What is measured."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def calibrate(
    write_to: Annotated[
        str, typer.Option("--write", metavar="FILE", help="The hardware file, for plan --cluster FILE.")
    ] = "hardware.toml",
    device: Annotated[Device, typer.Option(help="What to measure; auto: GPUs where there are any.")] = Device.AUTO,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Workers at once.", show_default="one for each GPU or core")
    ] = None,
    chip: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose table to start from, for a GPU without one.", show_default=False),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write what was found as JSON; - prints JSON alone.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure this machine for the planner.

    Example: fivefold calibrate --write mine.toml, then fivefold plan llama-3.2-1b --cluster mine.toml
    """
    from fivefold.calibration import calibrate as calibration
    from fivefold.calibration.hardware_file import save
    from fivefold.report.table import write

    text, report = calibration.calibrate(device=device.value, nproc=nproc, chip=chip)
    save(write_to, text)
    write(report, json=json)
    if json != "-":
        print(f"written: {write_to}\nnext: fivefold plan MODEL --cluster {write_to}")
