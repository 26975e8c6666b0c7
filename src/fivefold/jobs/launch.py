"""`fivefold launch`: the file of a job, and its submission."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import join

from fivefold.config import RunConfig, check_named, load_config
from fivefold.config.runfile import CODE, COMMAND_LINE, RunFile
from fivefold.core.errors import RunFailed, UserError, refuse
from fivefold.core.files import expanded, put, writing
from fivefold.jobs.engines import engine
from fivefold.jobs.job import Engine, Job

MORE = "fivefold docs start/cluster"
_MINUTES = {"m": 1, "h": 60, "d": 24 * 60}


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Arguments of `fivefold launch`. `devices`: of a node; None for 8, or 2 on a CPU. `time`: such as 90m or 12h."""

    run: Path
    to: str
    overrides: Sequence[str] = ()
    nodes: int = 1
    devices: int | None = None
    time: str | None = None
    image: str = ""


def job_of(request: JobRequest) -> Job:
    """The job. Raises `UserError` for a run file that cannot be run, or not on as many devices."""
    if not request.run.is_file():
        raise UserError(f"{request.run} is no file, and a job is made of a run file", fix="name one", more=MORE)
    for text in (str(request.run), *request.overrides, request.image):
        if not _is_utf8(text):
            raise UserError(f"{text!a} is not UTF-8, which the file of a job is", fix="name it in UTF-8", more=MORE)
    config = load_config(request.run, request.overrides)
    check_named(config)
    if config.train.nodes is not None:
        raise UserError(
            f"train.nodes is {config.train.nodes}: each node then starts its own ranks, and a job starts them itself",
            fix=f"train.nodes=null, with --nodes {request.nodes}; nodes that come and go: fivefold docs howto/elastic",
            more=MORE,
        )
    on_cpu = config.train.device == "cpu"
    devices = request.devices or (2 if on_cpu else 8)
    if not config.is_automatic:  # packages that are not here may be there
        refuse(config.layout.violations())
        config.layout.resolve(request.nodes * devices)
    return Job(
        run=request.run,
        text=request.run.read_text(encoding="utf-8"),
        name=config.run.name,
        runs=config.run.dir,
        nodes=request.nodes,
        devices=devices,
        on_cpu=on_cpu,
        minutes=None if request.time is None else minutes(request.time),
        image=request.image,
        overrides=tuple(request.overrides),
        **_named(config, request),
    )


def _named(config: RunConfig, request: JobRequest) -> dict[str, dict[str, str]]:
    """`Job.code` and `Job.files` of a run."""
    file = RunFile.read(request.run).overridden(request.overrides)
    code, files = dict[str, str](), dict[str, str]()
    for section, key in CODE:
        base = Path() if file.place((section, key)) == COMMAND_LINE else request.run.parent
        for name, text in file.code(section, key).items():
            path = text.rpartition(":")[0]
            code[name], files[name] = path, str(base / expanded(path))
    for key, sources in {"train": config.data.train, "validation": config.data.validation}.items():
        for at, source in enumerate(sources if isinstance(sources, tuple) else ()):
            files[f"data.{key}[{at}].path"] = source.path
    files |= {
        "model.name_or_path": config.model.name_or_path,
        "tokenizer.name_or_path": config.tokenizer.name_or_path,
        "objective.reference": config.objective.reference,
        "objective.teacher": config.objective.teacher,
        "adapter.path": config.adapter.path,
        "layout.hardware": config.hardware,
    }
    return {"code": code, "files": {key: name for key, name in files.items() if name}}


def minutes(time: str) -> int:
    """Minutes of `90m`, `12h` or `2d`. Raises `UserError` for anything else."""
    number = re.fullmatch("([1-9][0-9]{0,5})([mhd])", time.strip())
    if number is None:
        raise UserError(f"--time {time} is no time", fix="write 90m, 12h or 2d")
    return int(number[1]) * _MINUTES[number[2]]


def written(request: JobRequest) -> tuple[Engine, str, Path]:
    """The engine, the text of its file, and the name that the file has by default. Raises `UserError`."""
    chosen, job = engine(request.to), job_of(request)
    return chosen, chosen.text(job), Path(f"{job.label}{chosen.suffix}")


def submit_file(chosen: Engine, file: Path) -> str:
    """Submit a file, and return what the engine's program said. Raises `UserError` if it is missing, `RunFailed` if it
    refused."""
    command = list(chosen.submit(file))
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not here, so {file} is not submitted", fix=chosen.install, more=MORE)
    if chosen.package and find_spec(chosen.package) is None:
        raise UserError(f"{chosen.package} is not installed, so {file} is not submitted", fix=chosen.install, more=MORE)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise RunFailed(f"{join(command)}: {said}", fix=f"change {file}, and submit it: {join(command)}", more=MORE)
    return done.stdout.strip()


def save(chosen: Engine, file: Path, text: str) -> None:
    """Write the file. Raises `UserError` if it cannot be written, or if it is there and was changed."""
    with writing(file, instead="--output FILE"):
        is_another = file.is_file() and file.read_bytes() != text.encode()
    if is_another:
        raise UserError(
            f"{file} is there, with another content than would be written now",
            fix=f"submit it as it is: {join(chosen.submit(file))}; or name another: --output FILE",
            more=MORE,
        )
    put(file, text.encode(), instead="--output FILE")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no text
        return False
    return True
