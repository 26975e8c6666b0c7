"""Ray: a script that gives the worker of `fivefold.training.ray` to a `TorchTrainer`, for `ray job submit`."""

from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.jobs.job import Engine, Job
from fivefold.jobs.template import filled

RESTARTS = 3  # of all workers, after a failure
EXAMPLE = "REGISTRY/fivefold:TAG"  # of an image


def text(job: Job) -> str:
    """The script, `ray.py.j2` filled in. Raises `UserError` for what Ray cannot do."""
    if job.run.is_absolute() or ".." in job.run.parts:
        raise UserError(
            f"{job.run} is not below the current folder, and Ray copies that one to the nodes",
            fix="cd to the folder of the run file, and name it from there",
            more="docs/start/ray.md",
        )
    if job.minutes is not None:
        raise UserError("Ray has no limit of the time that a job takes", fix="leave --time out")
    runs = Path(job.runs).absolute()
    return filled(
        Path(__file__).with_suffix(".py.j2"),
        job,
        overrides=[*job.overrides, f"run.dir={runs}"],
        storage=str(runs / "ray"),
        restarts=RESTARTS,
        example=EXAMPLE,
    )


def submit(file: Path) -> tuple[str, ...]:
    """The command; the current folder travels with the script, its run folders do not."""
    excludes = '{"excludes": ["/runs"]}'
    return (
        *("ray", "job", "submit", "--no-wait", "--working-dir", ".", "--runtime-env-json", excludes),
        *("--", "python", str(file)),
    )


ENGINE = Engine(
    name="ray",
    title="a script for ray job submit",
    suffix=".py",
    text=text,
    submit=submit,
    install="pip install 'fivefold[ray]'; RAY_API_SERVER_ADDRESS says where the cluster is",
)
