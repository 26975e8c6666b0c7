"""JobSet of Kubernetes (`jobset.x-k8s.io`): all pods begin anew when one fails, and have names without a Service."""

from typing import Any

from fivefold.jobs import pods
from fivefold.jobs.job import PORT, Engine, Job
from fivefold.jobs.text import Note, yaml_of


def text(job: Job) -> str:
    pods.check(job, "jobset")
    head = f"{job.head}\nThe cluster needs JobSet 0.5 or newer: https://jobset.sigs.k8s.io/docs/installation"
    meets = [f"--nnodes={job.nodes}", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    meets += [f"--master-addr={job.label}-node-0-0.{job.label}", f"--master-port={PORT}"]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.queued_metadata(job),
        "spec": spec(job, meets),
    }
    return yaml_of(head, [pods.run_file(job), jobset])


def spec(job: Job, meets: list[str], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """The specification of the JobSet. `labels`: of its job."""
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": Note(
                pods.RESTARTS,
                "When a pod fails, or its node, all begin anew together, as often as this. The run goes on from its "
                "newest checkpoint.",
            ),
            "rules": [
                Note(
                    {
                        "name": "over",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                    },
                    "But not after exit code 2, below, nor once its time is over.",
                )
            ],
        },
        "replicatedJobs": [
            {
                "name": pods.CONTAINER,
                "replicas": 1,
                "template": {
                    **({"metadata": {"labels": labels}} if labels else {}),
                    "spec": {
                        "completions": Note(job.nodes, "A pod a node, all at once; each knows its index."),
                        "parallelism": job.nodes,
                        "completionMode": "Indexed",
                        **pods.deadline(job),
                        "backoffLimit": Note(0, "A pod that fails ends the others."),
                        "podFailurePolicy": pods.failure_policy(),
                        "template": pods.template(job, meets=meets),
                    },
                },
            }
        ],
    }


ENGINE = Engine(
    name="jobset",
    title="a JobSet of Kubernetes with its run file",
    suffix=".jobset.yaml",
    text=text,
    submit=pods.apply,
    install=pods.KUBECTL,
)
