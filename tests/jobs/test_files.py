"""The files of Kubernetes, JobSet, Kubeflow Trainer and SkyPilot, by their published schemas, and what is in them.

`published.json` is cut from those schemas (`tests/jobs/published.py`).
"""

import ast
import copy
import json
from dataclasses import replace
from pathlib import Path
from shlex import split
from typing import Any

import pytest
import yaml

from fivefold.core.errors import UserError
from fivefold.jobs import pods
from fivefold.jobs.engines import engine
from fivefold.jobs.job import Job
from fivefold.jobs.text import WIDTH, Note, yaml_of
from tests.jobs.published import FILE, JOBS, READS, documents

ONE = JOBS[1]  # three nodes of 8 GPUs, for 12 hours


def of(name: str, job: Job = ONE) -> dict[str, Any]:
    """The documents of a file by their kind."""
    return {document.get("kind", "Task"): document for document in yaml.safe_load_all(engine(name).text(job))}


def test_every_file_is_what_its_engine_reads(subtests: pytest.Subtests) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = json.loads(FILE.read_text())
    for name, kinds in READS.items():
        with subtests.test(msg=name):
            written = list(documents(name))
            assert list(dict.fromkeys(kind for kind, _ in written)) == kinds
            for kind, document in written:
                jsonschema.Draft202012Validator(schemas[kind]).validate(document)


def test_a_mistake_is_not_what_an_engine_reads() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = json.loads(FILE.read_text())
    job, jobset, task = of("kubernetes")["Job"], of("jobset")["JobSet"], of("skypilot", JOBS[0])["Task"]
    for kind, document, path, value in [
        ("Job", job, "spec.backofLimit", 3),
        ("Job", job, "spec.completions", "three"),
        ("Job", job, "spec.podFailurePolicy", {}),
        ("JobSet", jobset, "spec.failurePolicy.rules", [{"name": "a", "action": "Fail"}]),
        ("Task", task, "resources.recover", True),
        ("Task", task, "resources.job_recovery", {"recover_on_exit_codes": [256]}),
    ]:
        wrong = copy.deepcopy(document)
        *above, last = path.split(".")
        at = wrong
        for key in above:
            at = at[key]
        at[last] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schemas[kind]).validate(wrong)


def test_the_pods_of_kubernetes_are_the_same_under_each_kind() -> None:
    job = of("kubernetes")["Job"]["spec"]
    jobset = of("jobset")["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    runtime = of("trainjob")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    for spec in (job, jobset, runtime):
        assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
        assert spec["activeDeadlineSeconds"] == 12 * 3600
        first, saved, drained = spec["podFailurePolicy"]["rules"]
        assert first["action"] == "FailJob" and first["onExitCodes"]["values"] == [UserError.exit_code]
        assert saved["action"] == drained["action"] == "Ignore" and saved["onExitCodes"]["values"] == [143]
    specs = [spec["template"]["spec"] for spec in (job, jobset, runtime)]
    containers = [spec["containers"][0] for spec in specs]
    for container in containers:
        assert container["command"][:3] == ["python", "-m", "fivefold.launch.torchrun"]
        assert container["command"][-7:] == [
            "--nproc-per-node=8", "--shutdown-timeout=300", "-m", "fivefold.cli", "train", pods.RUN, "train.seed=7",
        ]  # fmt: skip
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        container.pop("command")
    assert containers[0] == containers[1] == containers[2]


def test_pods_meet_where_their_kind_names_the_first() -> None:
    job, jobset = of("kubernetes"), of("jobset")["JobSet"]
    command = job["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--master-addr=notes-0.notes" in command and "--node-rank=$(JOB_COMPLETION_INDEX)" in command
    assert job["Service"]["metadata"]["name"] == job["Job"]["spec"]["template"]["spec"]["subdomain"] == "notes"
    assert job["Service"]["spec"]["selector"] == job["Job"]["spec"]["template"]["metadata"]["labels"]
    replicated = jobset["spec"]["replicatedJobs"][0]
    command = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--master-addr=notes-{replicated['name']}-0-0.notes" in command
    trainjob = of("trainjob")
    assert trainjob["TrainJob"]["spec"]["runtimeRef"]["name"] == trainjob["TrainingRuntime"]["metadata"]["name"]
    assert trainjob["TrainJob"]["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 8}


def test_the_run_file_travels_whole() -> None:
    text = "# my run\nrun: {name: Notes}\ndata:\n  train: 'a: b'\n\n# an end without a newline"
    config = of("kubernetes", replace(ONE, text=text))["ConfigMap"]
    volumes = of("kubernetes")["Job"]["spec"]["template"]["spec"]["volumes"]
    assert config["data"] == {"run.yaml": text}
    assert {"name": "run-file", "configMap": {"name": config["metadata"]["name"]}} in volumes


def test_what_kubernetes_would_expand_is_kept() -> None:
    """It reads `$(NAME)` as a variable, and `$$` as `$`."""
    job = of("kubernetes", replace(ONE, overrides=("a=$(HOME) $$ $$(HOME)",)))["Job"]
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][-1] == "a=$$(HOME) $$$$ $$$$(HOME)"


def test_a_jobset_ends_with_a_wrong_request_and_with_its_time() -> None:
    """Any other end of its job lets JobSet begin anew, with all of its time."""
    (rule,) = of("jobset")["JobSet"]["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy", "DeadlineExceeded"]


def test_probes_name_whole_paths() -> None:
    for runs, begins in {"runs": "/work/runs/Notes/", "/work/a": "/work/a/Notes/"}.items():
        job = of("kubernetes", replace(ONE, runs=runs))["Job"]
        container = job["spec"]["template"]["spec"]["containers"][0]
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"][-1] == f"{begins}metrics.jsonl"


HOSTILE = (
    "it's", 'a "b"', "a$b", "$(false)", "`false`", "#x", "a: b", "a\nb", "%x", "a\\b", "-x", "模型", "x" * 200, "y",
    "{{ job }}", "{% raw %}", "a\u2028b\nc", "a\x85b\nc", "a\tb", " a ", "!x", "*a", "&a", "[a", "~", "\ufeffa\n",
    "a\x0cb\n", "1e3", *(f"a{chr(code)}b" for code in (1, 8, 27, 31, 127, 128, 155, 0xAD, 0x200B, 0x202E, 0xFFFE)),
)  # fmt: skip


def test_no_text_is_taken_apart(subtests: pytest.Subtests) -> None:
    """As the engines' own readers read the files. Slurm's shell: `tests/jobs/test_launch.py`."""
    for text in HOSTILE:
        name = text.replace("/", "")
        run = Path(f"{name}.yaml")
        job = replace(JOBS[0], run=run, text=f"# {text}", name=name, nodes=2, overrides=(f"data.train={text}",))
        train = ["train", f"./{run}" if name == "-x" else str(run), *job.overrides]
        with subtests.test(msg=repr(text)):
            kubernetes, task = of("kubernetes", job), of("skypilot", job)["Task"]
            assert kubernetes["ConfigMap"]["data"]["run.yaml"] == job.text
            command = kubernetes["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
            assert command[-1].replace("$$", "$") == job.overrides[0]
            assert split(task["run"].replace("\\\n", ""))[-4:] == [*train, "run.dir=/volume/runs"]
            for engine_name in ("ray", "sagemaker"):
                nodes = ast.walk(ast.parse(engine(engine_name).text(job)))
                texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
                assert {train[1], train[2]} <= texts


def test_a_task_of_skypilot() -> None:
    task = of("skypilot", replace(JOBS[0], nodes=2, overrides=("run.name=a b",)))["Task"]
    assert task["run"].endswith("train notes.yaml 'run.name=a b' run.dir=/volume/runs\n")
    assert task["resources"]["accelerators"] == "H100:8" and task["num_nodes"] == 2
    assert "volumes" not in of("skypilot", JOBS[0])["Task"]
    assert of("skypilot", replace(JOBS[0], on_cpu=True))["Task"]["resources"]["cpus"] == "8+"


def test_what_an_engine_cannot_run_is_refused() -> None:
    for name, job, said in [
        ("kubernetes", replace(ONE, image=""), "--image"),
        ("jobset", replace(ONE, code={"objective.path": "my_loss.py"}), "objective.path names code"),
        ("skypilot", ONE, "--time"),
        ("skypilot", replace(JOBS[0], run=Path("/a/b.yaml")), "cd to the folder"),
        ("ray", replace(JOBS[0], run=Path("../b.yaml")), "cd to the folder"),
    ]:
        with pytest.raises(UserError, match=said):
            engine(name).text(job)


def test_comments_stand_above_what_they_are_about() -> None:
    tree = {"a": Note({"b": [Note({"c": 1, "d": Note("x\ny", "two lines")}, "an item")]}, "long " * 30), "e": None}
    text = yaml_of("head\nof the file", [tree, {"f": Note([1], "last")}])
    assert [yaml.safe_load(part) for part in text.split("---\n")] == [
        {"a": {"b": [{"c": 1, "d": "x\ny"}]}, "e": None},
        {"f": [1]},
    ]
    assert yaml_of("", [{"a": ["y", "1e3", "0o17", "yes", "1e3x"]}]).endswith(
        "a:\n- 'y'\n- '1e3'\n- '0o17'\n- 'yes'\n- 1e3x\n"  # to Go all but the last are no text
    )
    lines = text.splitlines()
    assert lines[:2] == ["# head", "# of the file"] and max(map(len, lines)) <= WIDTH
    assert lines[lines.index("  - c: 1") - 1] == "  # an item"
    assert lines[lines.index("    d: |-") - 1] == "    # two lines"
