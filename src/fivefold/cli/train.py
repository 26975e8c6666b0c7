"""`fivefold train`."""

import json
import os
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.core.errors import UserError
from fivefold.core.streams import unseen_if_need_be

_COLUMNS = 80  # width of the list of keys


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml key=value",
            help="A run file, or a run folder to go on with (none: the built-in demo), and keys to set on top of it.",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Workers to start. Default: every GPU, or 2 on CPU.", show_default=False),
    ] = None,
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
    from fivefold.launch.sagemaker import find_hosts, set_for_hosts, torchrun
    from fivefold.launch.world import find_world

    hosts = find_hosts() if find_world("cpu") is None else None
    if hosts:
        set_for_hosts(hosts)
        command = torchrun(hosts, arguments, nproc)
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
    """Print every key with its default, choices and meaning."""
    from fivefold.config import keys

    for key in keys():
        default = "" if key.default is None else f"  [{_plain(key.default)}]"
        choices = "  " + " | ".join(map(_plain, key.choices)) if key.choices else ""
        print(fill(f"{key.name}{default}{choices}", width=_COLUMNS, subsequent_indent=" " * 8))
        print(fill(key.help, width=_COLUMNS, initial_indent="    ", subsequent_indent="    "))


def print_schema() -> None:
    """Print the JSON schema of a run file."""
    from fivefold.config import RunConfig
    from fivefold.config.key import json_schema_of

    print(json.dumps(json_schema_of(RunConfig), indent=2, ensure_ascii=False))


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(getattr(item, "path", str(item)) for item in value) or "none"
    return str(value)
