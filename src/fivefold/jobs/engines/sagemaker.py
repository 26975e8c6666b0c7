"""SageMaker: a script that makes a training job with the SDK's own `ModelTrainer` (version 3 of `sagemaker`)."""

import sys
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.jobs.job import LEFT, Engine, Job, no_option
from fivefold.jobs.text import script

INSTANCES = {8: "ml.p5.48xlarge", 4: "ml.g6e.12xlarge", 1: "ml.p5.4xlarge"}  # by their GPUs: H100, L40S, H100
ON_CPU = "ml.m7i.4xlarge"
RUNS = "/opt/ml/checkpoints"  # one host: SageMaker keeps it and the checkpoints' S3 path alike
CHANNEL = "shared"  # several hosts: a file system that all of them mount
HOURS = 24


def text(job: Job) -> str:
    """The script, `sagemaker.py.j2` filled in. Raises `UserError` for what SageMaker cannot do."""
    job.check_image("sagemaker")
    job.check_travels("SageMaker", left=LEFT)
    if not job.on_cpu and job.devices not in INSTANCES:
        *some, last = sorted(map(str, INSTANCES))
        raise UserError(
            f"no instance of SageMaker has {job.devices} GPUs",
            fix=f"--devices {', '.join(some)} or {last}",
            more="fivefold docs start/sagemaker",
        )
    runs = RUNS if job.nodes == 1 else f"/opt/ml/input/data/{CHANNEL}"
    workers = ["--nproc", str(job.devices)] if job.on_cpu else []
    return script(
        Path(__file__).with_suffix(".py.j2"),
        job,
        arguments=[*job.arguments, f"run.dir={runs}", *workers],
        runs=runs,
        left=LEFT,
        channel=CHANNEL,
        instance=ON_CPU if job.on_cpu else INSTANCES[job.devices],
        seconds=60 * (job.minutes or HOURS * 60),
    )


ENGINE = Engine(
    name="sagemaker",
    title="a script that starts a training job",
    suffix=".py",
    text=text,
    submit=lambda file: (sys.executable, no_option(file)),  # the one that has the SDK
    install="pip install 'fivefold[sagemaker]'",
    package="sagemaker",
)
