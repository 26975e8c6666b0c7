"""Kubernetes: an indexed Job of `batch/v1`, a headless Service for the names of its pods, and the run file."""

from typing import Any

from fivefold.jobs import pods
from fivefold.jobs.job import PORT, Engine, Job
from fivefold.jobs.text import Note, yaml_of


def text(job: Job) -> str:
    pods.check(job, "kubernetes")
    return yaml_of(job.head, [pods.run_file(job), _service(job), _job(job)])


def _service(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(job),
        "spec": {
            "clusterIP": Note("None", "A name for each pod, by which the ranks meet; nothing is balanced."),
            "publishNotReadyAddresses": Note(True, "Pods meet before they are READY."),
            "selector": pods.metadata(job)["labels"],
            "ports": [{"port": PORT}],
        },
    }


def _job(job: Job) -> dict[str, Any]:
    meets = [f"--nnodes={job.nodes}", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    meets += [f"--master-addr={job.label}-0.{job.label}", f"--master-port={PORT}"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.queued_metadata(job),
        "spec": {
            "completions": Note(job.nodes, "A pod a node, all at once; each knows its index."),
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            **pods.deadline(job),
            "backoffLimit": Note(
                pods.RESTARTS * job.nodes,
                f"Pods that may fail: {pods.RESTARTS} times all of them. When one is lost the others fail too, and "
                "each begins anew. The run goes on from its newest checkpoint.",
            ),
            "podFailurePolicy": pods.failure_policy(),
            "template": pods.template(job, meets=meets, subdomain=job.label),
        },
    }


ENGINE = Engine(
    name="kubernetes",
    title="an indexed Job of Kubernetes with its Service and run file",
    suffix=".job.yaml",
    text=text,
    submit=pods.apply,
    install=pods.KUBECTL,
)
