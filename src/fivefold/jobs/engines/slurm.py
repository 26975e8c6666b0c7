"""Slurm: a batch script for `sbatch`, whose `srun` starts one task a device."""

from pathlib import Path
from shlex import join

from fivefold.core.errors import UserError
from fivefold.jobs.job import Engine, Job, no_option, override
from fivefold.jobs.text import script

SAVES = 300  # seconds before the end of the allotment at which Slurm sends SIGTERM to the tasks
EXAMPLE = "nvcr.io#nvidia/pytorch:25.09-py3"  # of an image, in the words of enroot


def text(job: Job) -> str:
    """The batch script, `slurm.sbatch.j2` filled in."""
    if job.minutes is not None and job.minutes * 60 < 2 * SAVES:
        raise UserError(
            f"--time of {job.minutes} minutes: the last {SAVES} s are for a save, and nothing would be trained before",
            fix=f"--time {2 * SAVES // 60}m or more",
        )
    before, _, behind = override("run.name", f"{job.name}-0").rpartition("0")
    return script(
        Path(__file__).with_suffix(".sbatch.j2"),
        job,
        run=no_option(job.run),
        array_name=(before, behind),
        folder=f"{job.runs}/{job.name}",
        overrides=join(job.overrides),
        time=f"{job.minutes // 60}:{job.minutes % 60:02}:00" if job.minutes else "",
        saves=SAVES,
        example=EXAMPLE,
    )


ENGINE = Engine(
    name="slurm",
    title="a batch script for sbatch",
    suffix=".sbatch",
    text=text,
    submit=lambda file: ("sbatch", no_option(file)),
    install="run this on a login node of the cluster, or install Slurm's commands: apt install slurm-client",
)
