"""The published schemas of what engines read, cut down to the keys that our files use: `published.json`.

    python -m tests.jobs.published KUBERNETES JOBSET TRAINER SKYPILOT

KUBERNETES: `_definitions.json` of a strict schema, as the package `kubernetes-validate` has it. JOBSET and TRAINER: the
git repositories. SKYPILOT: the package, unpacked. A key that a schema does not have is an error here already. All are
under the Apache License 2.0; descriptions are left out.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import yaml

from fivefold.jobs.engines import engine
from fivefold.jobs.job import Job

FILE = Path(__file__).with_name("published.json")
KEPT = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required",
    "anyOf", "oneOf",
)  # fmt: skip
READS = {  # engine -> the kinds of its documents
    "kubernetes": ["ConfigMap", "Service", "Job"],
    "jobset": ["ConfigMap", "JobSet"],
    "trainjob": ["ConfigMap", "TrainingRuntime", "TrainJob"],
    "skypilot": ["Task"],
}
JOBS = [
    Job(
        run=Path("notes.yaml"), text="run: {name: Notes}\n", name="Notes", runs="runs", nodes=nodes, devices=devices,
        on_cpu=devices == 1, minutes=minutes, image="registry/fivefold:1", overrides=("train.seed=7",),
    )
    for nodes, devices, minutes in [(1, 8, None), (3, 8, 720), (2, 1, 90)]
]  # fmt: skip


def documents(name: str, jobs: Iterable[Job] = JOBS) -> Iterator[tuple[str, Any]]:
    """(kind, document) of all files of an engine."""
    for job in jobs:
        if name == "skypilot" and job.minutes is not None:
            job = Job(**{**vars(job), "minutes": None})
        for document in yaml.safe_load_all(engine(name).text(job)):
            yield document.get("kind", "Task"), document


def cut(schema: Mapping[str, Any], used: list[Any], definitions: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The part of a schema by which values that use the keys of `used` are checked. Raises `KeyError` for a key that it
    does not have."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    kept = {name: schema[name] for name in KEPT if name in schema}
    mappings = [value for value in used if isinstance(value, dict)]
    keys = dict.fromkeys(key for value in mappings for key in value)
    if "properties" in schema:
        kept["additionalProperties"] = False
        kept["properties"] = {}
        for key in keys:
            if key not in schema["properties"]:
                raise KeyError(f"{place} has no {key}")
            below = [value[key] for value in mappings if key in value]
            kept["properties"][key] = cut(schema["properties"][key], below, definitions, f"{place}.{key}")
    elif isinstance(schema.get("additionalProperties"), dict):
        below = [item for value in mappings for item in value.values()]
        kept["additionalProperties"] = cut(schema["additionalProperties"], below, definitions, f"{place}.*")
    if "items" in schema:
        below = [item for value in used if isinstance(value, list) for item in value]
        kept["items"] = cut(schema["items"], below, definitions, f"{place}[]")
    return kept


def _custom(repository: str, file: str, kind: str) -> tuple[str, Any]:
    """(source, schema) of a custom resource, from its definition in a git repository."""
    git = ["git", "-C", repository]
    text = subprocess.run([*git, "show", f"HEAD:{file}"], capture_output=True, text=True, check=True).stdout
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    tree = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schema = tree["spec"]["versions"][-1]["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"$ref": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    assert tree["spec"]["names"]["kind"] == kind
    return f"{file} at {commit[:12]}", schema


def _task(folder: str) -> Any:
    """The schema of a task of SkyPilot, with that of its resources, which it checks apart."""
    stand_ins = {name: MagicMock() for name in ("sky", "sky.skylet", "sky.utils")}
    source = (Path(folder) / "sky" / "utils" / "schemas.py").read_text(encoding="utf-8")
    for constant in ("MEMORY_SIZE_PATTERN", "TIME_PATTERN", "SUB_PATH_PATTERN", "ENV_VAR_IS_SKYPILOT_SERVER"):
        setattr(stand_ins["sky.skylet"].constants, constant, ".*")
    stand_ins["sky.skylet"].constants.ALL_CLOUDS = ["kubernetes"]
    names: dict[str, Any] = {}
    with patch.dict(sys.modules, stand_ins):
        exec(source, names)
        names["_task_config_schema"] = dict  # the settings of a server: our tasks have none
        task = names["get_task_schema"]()
        task["properties"]["resources"] = names["get_resources_schema"]()
    return task


def main(kubernetes: str, jobset: str, trainer: str, skypilot: str) -> None:
    """Write `published.json`."""
    definitions = json.loads(Path(kubernetes).read_text(encoding="utf-8"))["$defs"]
    of_kubernetes = f"kubernetes {Path(kubernetes).parent.name}"
    crds = "manifests/base/crds/trainer.kubeflow.org"
    sources = {
        "ConfigMap": (of_kubernetes, {"$ref": "io.k8s.api.core.v1.ConfigMap"}),
        "Service": (of_kubernetes, {"$ref": "io.k8s.api.core.v1.Service"}),
        "Job": (of_kubernetes, {"$ref": "io.k8s.api.batch.v1.Job"}),
        "JobSet": _custom(jobset, "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml", "JobSet"),
        "TrainingRuntime": _custom(trainer, f"{crds}_trainingruntimes.yaml", "TrainingRuntime"),
        "TrainJob": _custom(trainer, f"{crds}_trainjobs.yaml", "TrainJob"),
        "Task": (f"sky/utils/schemas.py of {next(Path(skypilot).glob('*.dist-info')).stem}", _task(skypilot)),
    }
    written: dict[str, list[Any]] = {}
    for name in READS:
        for kind, document in documents(name):
            written.setdefault(kind, []).append(document)
    schemas = {
        kind: {"$comment": f"from {source}, Apache License 2.0"} | cut(schema, written[kind], definitions, kind)
        for kind, (source, schema) in sources.items()
    }
    FILE.write_text(json.dumps(schemas, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
