"""`fivefold launch`: one description of a job, and the files that engines make of it."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.core.errors import RunFailed, UserError
from fivefold.jobs.engines import engine, names
from fivefold.jobs.job import Job
from fivefold.jobs.launch import JobRequest, job_of, minutes, submit_file, written

RUN = "train: {max_steps: 20, device: cpu}\nrun: {name: Notes 1}\n"


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.yaml").write_text(RUN)
    return Path("notes.yaml")


def command(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        cli.main(("launch", *arguments))
    return ended.value.code


def test_every_engine_has_the_name_of_its_module() -> None:
    assert {"slurm"} <= {*names()}
    for name in names():
        known = engine(name)
        assert known.name == name and known.suffix.startswith(".") and known.title and known.install


def test_every_engine_writes_the_whole_job(run_yaml: Path, subtests: pytest.Subtests) -> None:
    for name in names():
        with subtests.test(msg=name):
            request = JobRequest(
                run=run_yaml, to=name, nodes=3, devices=2, overrides=["train.seed=7"], image="an/image:1"
            )
            chosen, text, file = written(request)
            assert chosen.name == name and file == Path(f"notes-1{chosen.suffix}")
            assert "train.seed=7" in text and "an/image:1" in text and "#" in text


def test_a_job_is_described_in_no_engine_s_words(run_yaml: Path) -> None:
    job = job_of(JobRequest(run=run_yaml, to="slurm", nodes=3, overrides=["layout=dp2.shard3"], time="90m"))
    assert replace(job, files={}) == Job(
        run=run_yaml, text=RUN, name="Notes 1", runs="runs", nodes=3, devices=2, on_cpu=True, minutes=90,
        overrides=("layout=dp2.shard3",),
    )  # fmt: skip
    assert (job.ranks, job.label, job.described) == (6, "notes-1", "3 nodes, 2 ranks each")
    assert job_of(JobRequest(run=run_yaml, to="slurm", overrides=["train.device=cuda"])).described == "1 node, 8 GPUs"


def test_a_label_is_one_of_dns_and_tells_runs_apart() -> None:
    long = "a study of the learning rate of a large model "
    names = [
        "Notes_1",
        "y",
        "1e3",
        "2024-11-28",
        "-x",
        "模型",
        "モデル",
        f"{long}3e-4",
        f"{long}6e-4",
        "x" * 239,
        "...",
    ]
    labels = [Job(run=Path("a.yaml"), text="", name=name, runs="r").label for name in names]
    assert labels[:4] == ["notes-1", "y", "run-1e3", "run-2024-11-28"]
    assert len({*labels}) == len(names)
    assert all(re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", label) for label in labels)


def test_what_does_not_travel_is_refused(run_yaml: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Ray, SkyPilot and SageMaker copy the current folder, and Kubernetes the run file alone."""
    here, beside = tmp_path / "project", tmp_path / "beside.txt"
    for file in (here / "a.txt", here / "runs" / "old" / "hf" / "config.json", beside):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    (here / "own.py").write_text("loss = print")
    (here / "configs").mkdir()
    run = (here / "configs" / "notes.yaml").relative_to(here)
    own = ["objective.name=python", "objective.path"]
    copies, pods = {"ray", "skypilot", "sagemaker"}, {"kubernetes", "jobset", "trainjob"}
    os.chdir(here)
    for lines, overrides, refused in [
        ("", ["data.train=a.txt", "model.name_or_path=org/name"], set()),
        ("", ["data.train=/work/there.txt", "run.dir=/work/elsewhere"], set()),
        ("", ["data.train=/elsewhere/there.txt"], set()),
        ("", ["data.train=../beside.txt"], copies | pods),
        ("", [f"data.train={beside}"], (copies | pods) - {"ray"}),
        ("", ["data.train=a.txt", "model.name_or_path=runs/old/hf"], {"ray", "sagemaker"}),
        ("objective: {name: python, path: ../own.py:loss}", [], pods),
        ("objective: {name: python, path: ../../own.py:loss}", [], copies | pods),
        ("", [own[0], f"{own[1]}=/work/own.py:loss"], set()),
        ("", [own[0], f"{own[1]}=own.py:loss"], pods),
        ("", ["run.dir=/elsewhere"], pods),
    ]:
        run.write_text(f"{RUN}{lines}\n")
        for name in names():
            with subtests.test(msg=f"{name} {lines} {overrides}"):
                request = JobRequest(run=run, to=name, overrides=overrides, image="an/image:1", devices=1)
                try:
                    written(request)
                except UserError as error:
                    assert name in refused, error
                    assert any(key in error.what for key in ("data.train[0].path", "model.name", own[1], "run.dir"))
                else:
                    assert name not in refused


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_submitted(run_yaml: Path) -> None:
    with pytest.raises(UserError, match="6"):
        job_of(JobRequest(run=run_yaml, to="slurm", nodes=3, overrides=["layout=tp4"]))


def test_times() -> None:
    assert [minutes(text) for text in ("90m", "12h", "2d")] == [90, 720, 2880]
    for wrong in ("0m", "12", "1:30:00", "h"):
        with pytest.raises(UserError, match="--time"):
            minutes(wrong)
    with pytest.raises(UserError, match="nothing would be trained"):
        engine("slurm").text(Job(run=Path("a.yaml"), text="", name="a", runs="r", minutes=9))


def test_the_file_is_printed_or_written(
    run_yaml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("notes.yaml", "--to", "slurm") == 0
    text = capsys.readouterr().out
    assert command("notes.yaml", "--to", "slurm", "--output", "a/job.sbatch") == 0
    assert Path("a/job.sbatch").read_text() == text
    assert "sbatch a/job.sbatch" in capsys.readouterr().out
    Path("a/job.sbatch").write_text("mine")
    assert command("notes.yaml", "--to", "slurm", "--output", "a/job.sbatch") == 2
    assert "submit it as it is: sbatch a/job.sbatch" in capsys.readouterr().err
    assert Path("a/job.sbatch").read_text() == "mine"
    monkeypatch.setenv("PATH", "/nowhere")
    assert command("notes.yaml", "--to", "slurm", "--submit") == 2
    assert "sbatch is not here, so notes-1.sbatch is not submitted" in capsys.readouterr().err


@pytest.mark.full
def test_the_file_is_submitted(
    run_yaml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Path("bin/sbatch")
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "Submitted $1"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent.resolve()}{os.pathsep}{os.environ['PATH']}")
    assert command("notes.yaml", "--to", "slurm", "--submit") == 0
    assert "Submitted notes-1.sbatch" in capsys.readouterr().out
    assert Path("notes-1.sbatch").read_text() == engine("slurm").text(job_of(JobRequest(run=run_yaml, to="slurm")))
    fake.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(RunFailed, match="invalid partition"):
        submit_file(engine("slurm"), Path("notes-1.sbatch"))


def test_what_is_wrong_is_said(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in {
        ("notes.yaml", "--to", "slurmm"): "did you mean --to slurm?",
        ("missing.yaml", "--to", "slurm"): "missing.yaml is no file",
        ("train.seed=1", "--to", "slurm"): "is no run file",
        ("notes.yaml", "train.sed=1", "--to", "slurm"): "train.seed",
        ("notes.yaml", "train.nodes=2:4", "--to", "slurm"): "train.nodes=null",
        ("notes.yaml", "data.train=\udcff", "--to", "slurm"): "is not UTF-8",
    }.items():
        assert command(*arguments) == 2
        assert said in capsys.readouterr().err


@pytest.mark.full
def test_the_batch_script_is_what_bash_reads(run_yaml: Path) -> None:
    """With a name, a path and values that a shell would take apart; `srun` and `scontrol` are stand-ins."""
    text = engine("slurm").text(
        Job(run=Path("my runs/a.yaml"), text="", name="it's", runs="r", overrides=("x=a b", "y=$(false)\n#"))
    )
    srun = (
        'printf "<%s>" "$@"; for _ in $LATE; do kill -USR1 $PPID; sleep 0.3; done; '
        'if [ "$SAVES" ]; then mkdir -p "$SAVES"; fi; exit ${CODE:-0}'
    )
    for name, line in {"srun": srun, "scontrol": 'echo "$@" >>said; echo n1', "scancel": 'echo "$@" >>said'}.items():
        Path(name).write_text(f"#!/bin/sh\n{line}\n")
        Path(name).chmod(0o755)
    env = {"PATH": f"{Path.cwd()}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "9"}

    def run(error: str = "", **more: str) -> tuple[int, str]:
        done = subprocess.run(["bash"], input=text, env=env | more, capture_output=True, text=True, check=False)
        assert done.stderr == error
        return done.returncode, done.stdout

    assert run() == (0, "<--kill-on-bad-exit=1><fivefold><train><my runs/a.yaml><x=a b><y=$(false)\n#>")
    late = {"CODE": "143", "LATE": "1 2"}  # it is told twice, and saves after that
    assert run(SLURM_ARRAY_TASK_ID="2")[1].endswith("<run.name=it's-2><train.seed=2>")
    assert [run(CODE=code)[0] for code in ("2", "143")] == [2, 143] and "requeue" not in Path("said").read_text()
    assert run(CODE="0", LATE="1")[0] == 0 and "requeue" not in Path("said").read_text()
    assert run(**late, SAVES="r/it's/checkpoints/step-000002")[0] == 143
    assert Path("said").read_text().splitlines()[-2:] == ["--signal=TERM 9", "requeue 9"]
    task = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"}
    assert run(**late, **task, SAVES="r/it's-2/checkpoints/step-000002")[0] == 143
    assert Path("said").read_text().splitlines()[-2:] == ["--signal=TERM 9_2", "requeue 9_2"]
    # Nothing new is saved: it would be queued again for ever.
    nothing = "not queued again: no new checkpoint in r/it's\n"
    assert run(nothing, **late, SAVES="r/it's/checkpoints/step-000002")[0] == 143
    assert Path("said").read_text().splitlines()[-1] == "--signal=TERM 9"
