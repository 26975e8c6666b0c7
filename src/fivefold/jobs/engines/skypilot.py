"""SkyPilot: a task for `sky jobs launch`, which finds machines in clouds, and others when they are lost."""

from shlex import join
from typing import Any

from fivefold.core.errors import UserError
from fivefold.jobs.job import PORT, SAVED, Engine, Job, no_option
from fivefold.jobs.text import Note, yaml_of

VOLUME = "/volume"  # where the folder is that all nodes share


def text(job: Job) -> str:
    job.check_image("skypilot")
    job.check_travels("SkyPilot")
    if job.minutes is not None:
        raise UserError("SkyPilot has no limit of the time that a job takes", fix="leave --time out")
    return yaml_of(job.head, [_task(job)])


def _task(job: Job) -> dict[str, Any]:
    volumes = Note(
        {VOLUME: "fivefold"},
        "A folder that all nodes share, for the run: sky volumes apply makes one, on Kubernetes and some clouds. "
        "Elsewhere mount a network file system there in setup.",
    )
    return {
        "name": job.label,
        "num_nodes": job.nodes,
        "resources": _resources(job),
        "workdir": Note(
            ".",
            "The current folder, with the run file and its data, is copied to each node, without what .skyignore "
            "names, or where there is none .gitignore: data that git ignores would be missing there.",
        ),
        **({"volumes": volumes} if job.nodes > 1 else {}),
        "run": Note(
            _commands(job),
            "On each node: torchrun, which starts a rank a device, with the exit code of the rank that failed first.",
        ),
    }


def _resources(job: Job) -> dict[str, Any]:
    gpus = Note(
        f"H100:{job.devices}",
        f"GPUs of a node. Several kinds let SkyPilot choose, as a list: [H200:{job.devices}, H100:{job.devices}]. "
        "sky gpus list shows what there is.",
    )
    saved = Note([SAVED], "143: saved on SIGTERM, which does not count.")
    return {
        **({"cpus": f"{job.devices}+"} if job.on_cpu else {"accelerators": gpus}),
        "image_id": Note(
            f"docker:{job.image}", "SkyPilot installs things in it: its user has to be root, or have sudo."
        ),
        **({"network_tier": Note("best", "The fastest network between nodes.")} if job.nodes > 1 else {}),
        "use_spot": Note(
            False,
            "true: machines that may be taken away, for less. SkyPilot then finds others, and the run goes on from its "
            "newest checkpoint"
            + (". With one node that is a copy: set checkpoint.remote." if job.nodes == 1 else " on the volume."),
        ),
        "job_recovery": {
            "max_restarts_on_errors": Note(3, "Restarts after an exit code that is not 0, a wrong request (2) too."),
            "recover_on_exit_codes": saved,
        },
    }


def _commands(job: Job) -> str:
    runs = [] if job.nodes == 1 else [f"run.dir={VOLUME}/runs"]
    lines = [
        "python -m fivefold.launch.torchrun",
        '--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK"',
        f'--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port={PORT}',
        f"--nproc-per-node={job.devices} -m fivefold.cli {join((*job.arguments, *runs))}",
    ]
    return " \\\n  ".join(lines) + "\n"


ENGINE = Engine(
    name="skypilot",
    title="a task of SkyPilot",
    suffix=".sky.yaml",
    text=text,
    submit=lambda file: ("sky", "jobs", "launch", "--yes", "--detach-run", no_option(file)),
    install="pip install skypilot, with an extra for each cloud: https://docs.skypilot.co",
)
