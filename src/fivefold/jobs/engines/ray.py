"""Ray: a script that gives the worker of `fivefold.training.ray` to a `TorchTrainer`, for `ray job submit`."""

from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.jobs.job import LEFT, Engine, Job, no_option, override
from fivefold.jobs.text import script

RESTARTS = 3  # of all workers, after a failure
EXAMPLE = "REGISTRY/fivefold:TAG"  # of an image


def text(job: Job) -> str:
    """The script, `ray.py.j2` filled in. Raises `UserError` for what Ray cannot do."""
    job.check_travels("Ray", left=LEFT, shares_disks=True)
    if job.minutes is not None:
        raise UserError("Ray has no limit of the time that a job takes", fix="leave --time out")
    runs = Path(job.runs).absolute()
    return script(
        Path(__file__).with_suffix(".py.j2"),
        job,
        overrides=[*job.overrides, override("run.dir", str(runs))],
        storage=str(runs / "ray"),
        restarts=RESTARTS,
        example=EXAMPLE,
    )


def submit(file: Path) -> tuple[str, ...]:
    """The command; the current folder travels with the script, its run folders do not."""
    excludes = f'{{"excludes": ["/{LEFT}"]}}'
    return (
        *("ray", "job", "submit", "--no-wait", "--working-dir", ".", "--runtime-env-json", excludes),
        *("--", "python", no_option(file)),
    )


ENGINE = Engine(
    name="ray",
    title="a script for ray job submit",
    suffix=".py",
    text=text,
    submit=submit,
    install="pip install 'fivefold[ray]'; RAY_API_SERVER_ADDRESS says where the cluster is",
)
