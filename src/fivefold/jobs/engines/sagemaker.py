"""SageMaker: a script that makes a training job with the SDK's own `ModelTrainer` (version 3 of `sagemaker`)."""

import json
from functools import partial
from pathlib import Path
from shlex import quote

from jinja2 import Environment, StrictUndefined

from fivefold.core.errors import UserError
from fivefold.jobs.job import Engine, Job

INSTANCES = {8: "ml.p5.48xlarge", 4: "ml.g6e.12xlarge", 1: "ml.p5.4xlarge"}  # by their GPUs: H100, L40S, H100
ON_CPU = "ml.m7i.4xlarge"
EXAMPLE = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/fivefold:TAG"
RUNS = "/opt/ml/checkpoints"  # one host: SageMaker keeps it and the checkpoints' S3 path alike
CHANNEL = "shared"  # several hosts: a file system that all of them mount
HOURS = 24


def text(job: Job) -> str:
    """The script, `sagemaker.py.j2` filled in. Raises `UserError` for a number of GPUs that no instance has."""
    if not job.on_cpu and job.devices not in INSTANCES:
        *some, last = sorted(map(str, INSTANCES))
        raise UserError(
            f"no instance of SageMaker has {job.devices} GPUs",
            fix=f"--devices {', '.join(some)} or {last}",
            more="docs/start/sagemaker.md",
        )
    runs = RUNS if job.nodes == 1 else f"/opt/ml/input/data/{CHANNEL}"
    workers = ["--nproc", str(job.devices)] if job.on_cpu else []
    template = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template.filters["python"] = partial(json.dumps, ensure_ascii=False)  # text is the same in both
    return template.from_string(Path(__file__).with_suffix(".py.j2").read_text(encoding="utf-8")).render(
        job=job,
        arguments=[*job.arguments, f"run.dir={runs}", *workers],
        runs=runs,
        channel=CHANNEL,
        instance=ON_CPU if job.on_cpu else INSTANCES[job.devices],
        image=job.image or EXAMPLE,
        seconds=60 * (job.minutes or HOURS * 60),
        quote=quote,
    )


ENGINE = Engine(
    name="sagemaker",
    title="a script that starts a training job",
    suffix=".py",
    text=text,
    submit=lambda file: ("python", str(file)),
    install="pip install 'fivefold[sagemaker]'",
    package="sagemaker",
)
