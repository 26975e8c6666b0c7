"""The pods of Kubernetes, the same under each of its kinds of job: what runs, with what, and how it is watched."""

import os
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any

from fivefold.core.errors import UserError
from fivefold.jobs.job import PORT, SAVED, WRONG, Job, no_option
from fivefold.jobs.text import Note

CONTAINER = "node"  # the name that Kubeflow Trainer asks for
FOLDER = "/work"  # where the volume is: relative paths of a run file begin there
RUN = "/job/run.yaml"
GRACE = 300  # seconds from SIGTERM to SIGKILL
RESTARTS = 10
KUBECTL = "install kubectl: https://kubernetes.io/docs/tasks/tools"
GPUS = "nvidia.com/gpu"
CACHES = {"FIVEFOLD_CACHE": "fivefold", "HF_HOME": "huggingface"}  # environment variables, and their folders


def check(job: Job, engine: str) -> None:
    """Raise `UserError` for a job without an image, with code beside its run file, or with files of this machine."""
    job.check_image(engine)
    for key, path in job.code.items():
        if not _is_on_volume(path):
            raise UserError(
                f"{key} names code beside the run file, {path}, and a pod has the run file alone",
                fix=f"put the code on the volume, and write its whole path there: {FOLDER}/my_loss.py:loss",
                more="fivefold docs start/kubernetes",
            )
    lost = {"run.dir": job.runs} | {key: path for key, path in job.files.items() if glob(path)}
    for key, path in lost.items():
        if not _is_on_volume(os.path.join(FOLDER, path)):
            raise UserError(
                f"{key}: {path} is not on the volume, which pods see as {FOLDER}, and is gone with the pod",
                fix=f"copy it to the volume, and name it from there: a relative path begins at {FOLDER}"
                if key != "run.dir"
                else "run.dir=runs, which is on the volume",
                more="fivefold docs start/kubernetes",
            )


def _is_on_volume(path: str) -> bool:
    return PurePosixPath(os.path.normpath(path)).is_relative_to(FOLDER)


def metadata(job: Job) -> dict[str, Any]:
    return {
        "name": job.label,
        "labels": {"app.kubernetes.io/name": "fivefold", "app.kubernetes.io/instance": job.label},
    }


def queued_metadata(job: Job) -> Note:
    """Name and labels of the object that starts the pods."""
    return Note(
        metadata(job), "Under Kueue, the label kueue.x-k8s.io/queue-name lets it wait for room for all of its pods."
    )


def apply(file: Path) -> tuple[str, ...]:
    return ("kubectl", "apply", "-f", no_option(file))


def run_file(job: Job) -> dict[str, Any]:
    """The run file, as an object that pods see as a file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job),
        "data": {"run.yaml": Note(job.text, "The run file. Paths in it are those inside of the pods.")},
    }


def deadline(job: Job) -> dict[str, Any]:
    if job.minutes is None:
        return {}
    said = "Seconds that it may take. Then its pods get SIGTERM, and the run saves."
    return {"activeDeadlineSeconds": Note(60 * job.minutes, said)}


def template(job: Job, *, meets: list[str], subdomain: str = "") -> dict[str, Any]:
    """The template of a pod. `meets`: options of torchrun that say where pods meet, and which of them this one is."""
    return {
        "metadata": {"labels": metadata(job)["labels"]},
        "spec": {
            **(
                {"subdomain": Note(subdomain, "With the Service above, it gives each pod a name.")} if subdomain else {}
            ),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": Note(
                GRACE,
                "Seconds from SIGTERM to SIGKILL, when a pod is drained or preempted. The run saves the step that it "
                "is in: they have to hold a step and a save.",
            ),
            "securityContext": Note(
                {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
                "The user of the image, who has to be able to write to the volume.",
            ),
            "containers": [_container(job, meets)],
            "volumes": [
                {
                    "name": "work",
                    "persistentVolumeClaim": Note(
                        {"claimName": "fivefold"},
                        "A claim that all pods can write to (ReadWriteMany). It holds data, models and runs.",
                    ),
                },
                {"name": "run-file", "configMap": {"name": job.label}},
                {
                    "name": "shared-memory",
                    "emptyDir": Note(
                        {"medium": "Memory"},
                        "Shared memory of the ranks of a pod, and of NCCL. A container has 64 MiB without it.",
                    ),
                },
            ],
        },
    }


def _container(job: Job, meets: list[str]) -> dict[str, Any]:
    metrics = str(PurePosixPath(FOLDER, job.runs, job.name, "metrics.jsonl"))  # probes may begin in another folder
    overrides = [override.replace("$", "$$") for override in job.overrides]  # Kubernetes reads $(NAME), and $$ as $
    torchrun = ["python", "-m", "fivefold.launch.torchrun", *meets, f"--nproc-per-node={job.devices}"]
    return {
        "name": CONTAINER,
        "image": job.image,
        "workingDir": Note(FOLDER, "Relative paths in the run file, such as run.dir, begin here."),
        "command": Note(
            [*torchrun, f"--shutdown-timeout={GRACE}", "-m", "fivefold.cli", "train", RUN, *overrides],
            "torchrun, which starts a rank a device, with the exit code of the rank that failed first.",
        ),
        "env": Note(
            [{"name": name, "value": f"{FOLDER}/.cache/{folder}"} for name, folder in CACHES.items()],
            "Prepared data and models from the hub, once for all pods and their restarts.",
        ),
        "envFrom": Note(
            [{"secretRef": {"name": "fivefold", "optional": True}}],
            "A secret with what the run reads, such as HF_TOKEN and WANDB_API_KEY, if there is one.",
        ),
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {GPUS: job.devices}}
        if not job.on_cpu
        else {"requests": {"cpu": job.devices, "memory": f"{2 * job.devices}Gi"}},
        "startupProbe": Note(
            {
                "exec": {"command": ["sh", "-c", f'test "$1" -nt {RUN}', "sh", metrics]},
                "periodSeconds": 10,
                "failureThreshold": 8640,
            },
            "A pod is READY once the run has written its first step since the pod began. That may take a day: data and "
            "models are prepared before.",
        ),
        "livenessProbe": Note(
            {
                "exec": {"command": ["sh", "-c", 'find "$1" -mmin -60 | grep -q .', "sh", metrics]},
                "periodSeconds": 60,
                "failureThreshold": 3,
            },
            "Then a pod is ended when the run writes no step for an hour. (Ranks that stand still end themselves "
            "earlier, after train.collective_timeout.)",
        ),
        "volumeMounts": [
            {"name": "work", "mountPath": FOLDER},
            {"name": "run-file", "mountPath": "/job"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def failure_policy() -> dict[str, Any]:
    """Policy of a job for a failed pod, by its exit code or by what has ended it. Other failures are counted."""

    def exits(code: int) -> dict[str, Any]:
        return {"containerName": CONTAINER, "operator": "In", "values": [code]}

    return {
        "rules": [
            Note({"action": "FailJob", "onExitCodes": exits(WRONG)}, "2: the request is wrong, and would fail again."),
            Note(
                {"action": "Ignore", "onExitCodes": exits(SAVED)}, "143: saved on SIGTERM. It begins anew, uncounted."
            ),
            Note(
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                "Drained, preempted or evicted: the same.",
            ),
        ]
    }
