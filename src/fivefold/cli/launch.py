"""`fivefold launch`."""

from pathlib import Path
from shlex import join
from typing import Annotated

import typer

from fivefold.cli.options import Debug, place
from fivefold.cli.train import split_arguments
from fivefold.core.errors import UserError
from fivefold.core.terminal import say
from fivefold.jobs.engines import names


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
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="The most that it may take, such as 12h.", show_default=False)
    ] = None,
    image: Annotated[
        str, typer.Option(metavar="NAME", help="Container image that has fivefold in it.", show_default=False)
    ] = "",
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the file instead of printing it.", show_default=False, callback=place),
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
    from fivefold.jobs import launch as jobs

    request = jobs.Request(run=run, to=to, overrides=overrides, nodes=nodes, devices=devices, time=time, image=image)
    engine, text, usual = jobs.written(request)
    if not (output or submit):
        print(text, end="")
        return
    file = Path(output) if output else usual
    jobs.save(engine, file, text)
    command = join(engine.submit(file))
    say(f"wrote {file}, {engine.title}" + ("" if submit else f"; submit it with: {command}"))
    if submit:
        say(jobs.submit(engine, file))
