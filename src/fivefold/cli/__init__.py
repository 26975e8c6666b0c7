"""The command line. Each verb calls one library function, and none imports torch.

Errors are three lines on standard error: what is wrong and where, the likely fix, where to read more. Tracebacks appear
under `--debug` only. Exit codes: 0 fine, 1 the operation failed, 2 the request is wrong.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from fivefold.cli import layouts, machine, model, pages, train
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import cannot_write, is_users
from fivefold.core.interrupts import INTERRUPTED
from fivefold.core.streams import CLOSED_PIPE, is_closed_pipe, is_pipe, is_unwritable, let_go, make_usable
from fivefold.core.system import version_line
from fivefold.core.text import say

# Error texts for exhausted memory that do not come as `MemoryError`.
NO_MEMORY = ("Cannot allocate memory", "failed to map segment", "can't start new thread")

# Error texts for a rank that has ended, of our shared memory, torch's store, gloo and NCCL.
LOST_RANK = ("has left", "DistNetworkError", "Connection closed by", "Connection reset by", "remote process exited")

# Listed in this order, each with the first line of its docstring.
VERBS: dict[str, Callable[..., None]] = {
    "train": train.train,
    "launch": train.launch,
    "data": train.data,
    "plan": layouts.plan,
    "rehearse": layouts.rehearse,
    "verify": layouts.verify,
    "compare": layouts.compare,
    "generate": model.generate,
    "evaluate": model.evaluate,
    "export": model.export,
    "convert": train.convert,
    "report": model.report,
    "calibrate": machine.calibrate,
    "doctor": machine.doctor,
    "docs": pages.docs,
}

app = typer.Typer(name="fivefold", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(version_line())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def verbs(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say what is installed, for bug reports."),
    ] = False,
) -> None:
    """Train any Hugging Face language model, unchanged, in five dimensions of parallelism."""
    if context.invoked_subcommand is None:
        print((verbs.__doc__ or "").strip() + "\n")
        for name, verb in VERBS.items():
            print(f"  fivefold {name:<10} {(verb.__doc__ or '').strip().splitlines()[0].rstrip('.')}")
        print("\nstart here: fivefold train      options of a verb: fivefold VERB --help")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    make_usable()
    given = list(sys.argv[1:] if arguments is None else arguments)
    was_pipe = is_pipe()
    try:
        _check_docstrings()
        code = app(given, prog_name="fivefold", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as stopped:
        # Typer and Rich exit with 1, silently, after any broken pipe.
        broken = stopped.__context__
        if is_closed_pipe(broken, was_pipe=was_pipe):
            code = CLOSED_PIPE
        elif isinstance(broken, BrokenPipeError) and type(stopped) is SystemExit:
            code = _say(_unexpected(broken), debug="--debug" in given)
        else:
            code = stopped.code
    except UserError as error:
        code = _say(error, debug="--debug" in given)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            code = INTERRUPTED  # Python 3.11 turns an interrupt inside `__set_name__` into a RuntimeError
        elif is_closed_pipe(error):
            code = CLOSED_PIPE  # the reader has read enough
        elif is_unwritable(error):
            code = _say(RunFailed(f"standard output cannot be written: {error}"), debug="--debug" in given)
        elif not hasattr(error, "format_message"):  # anything but a usage error from typer
            code = _say(_unexpected(error), debug="--debug" in given)
        else:
            verb = next((word for word in given if word in VERBS), None)
            help_line = f"fivefold {verb} --help" if verb else "fivefold --help"
            code = _say(UserError(error.format_message(), fix=help_line), debug=False)
    if code == INTERRUPTED:
        with suppress(OSError):
            print("stopped", file=sys.stderr)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        let_go()
    sys.exit(code if isinstance(code, int) else 0)


def _say(error: UserError, *, debug: bool) -> int:
    """Print the three lines of an error, under `--debug` after its traceback, and return the exit code."""
    if debug:
        inner = getattr(error, "traceback", "") or "".join(traceback.format_exception(error.__cause__ or error))
        say(inner, stream=sys.stderr)
    with suppress(OSError):
        say(error, stream=sys.stderr)
    return error.exit_code


def _check_docstrings() -> None:
    """Raise `UserError` if Python leaves out docstrings: `transformers` writes parts of its own from them."""
    if sys.flags.optimize > 1:
        raise UserError(
            "transformers cannot be imported without docstrings, and Python leaves them out here (-OO)",
            fix="unset PYTHONOPTIMIZE, or set it to 1",
        )


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _unexpected(error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError) and _is_nowhere():
        return UserError("the folder that this command was started in has been removed", fix="cd to one that is there")
    if isinstance(error, OSError) and error.filename is not None and is_users(error):
        return cannot_write(error.filename, error, instead="choose another place")
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return RunFailed("the memory that this process may have is used up", fix="free some, or raise ulimit -v")
    first_line = (str(error).strip().splitlines() or [""])[0]
    what, fix = f"{type(error).__name__}: {first_line}", "this is a bug of fivefold; --debug shows where"
    if isinstance(error, RuntimeError) and any(words in what for words in LOST_RANK):
        what = f"another rank has ended, or cannot be reached: {first_line}"
        fix = "look at what the other ranks have said"
    failure = RunFailed(what, fix=fix)
    failure.__cause__ = error
    return failure
