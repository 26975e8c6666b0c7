"""Kubeflow Trainer v2 (`trainer.kubeflow.org`): a TrainJob, and the TrainingRuntime that says how its pods run."""

from typing import Any

from fivefold.jobs import pods
from fivefold.jobs.engines import jobset
from fivefold.jobs.job import Engine, Job
from fivefold.jobs.text import Note, yaml_of

VERSION = "trainer.kubeflow.org/v1alpha1"
TRAINS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # the job of a runtime whose size a TrainJob sets


def text(job: Job) -> str:
    pods.check(job, "trainjob")
    head = (
        f"{job.head}\nThe cluster needs Kubeflow Trainer 2.2 or newer: https://www.kubeflow.org/docs/components/trainer"
    )
    return yaml_of(head, [pods.run_file(job), _runtime(job), _trainjob(job)])


def _runtime(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": VERSION,
        "kind": "TrainingRuntime",
        "metadata": pods.metadata(job),
        "spec": {
            "mlPolicy": Note(
                {"numNodes": job.nodes, "torch": {}},
                "Trainer tells torchrun in each pod, by PET_ variables, how many there are, which it is and where they "
                "meet.",
            ),
            "template": {"spec": jobset.spec(job, [], labels=TRAINS)},
        },
    }


def _trainjob(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": VERSION,
        "kind": "TrainJob",
        "metadata": pods.queued_metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.label},
            "trainer": {"numNodes": job.nodes, "numProcPerNode": job.devices},
        },
    }


ENGINE = Engine(
    name="trainjob",
    title="a TrainJob of Kubeflow Trainer with its runtime and run file",
    suffix=".trainjob.yaml",
    text=text,
    submit=pods.apply,
    install=pods.KUBECTL,
)
