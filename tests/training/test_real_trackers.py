"""The trackers themselves, on this machine alone: a run and its resume are one run of each, with every row once.

`make campaign` installs them (extra `trackers`). W&B is offline, MLflow writes to a folder, Trackio to a database.
"""

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import as_process

STEPS = [1, 2, 3, 4, 5, 6]
RUN = """
model: {name_or_path: demo, init: random}
tokenizer: {name_or_path: byte}
data: {train: text.txt, validation: 10%, seq_length: 64}
train: {max_steps: 4, global_batch_size: 4, micro_batch_size: 2}
eval: {every: 2}
sample: {every: 2, messages: ["2 times 2?"], prompts: ["3 times 3 is "], max_new_tokens: 4}
checkpoint: {every: 2}
log: {to: [jsonl, wandb, mlflow, trackio, tensorboard]}
run: {name: tracked}
"""


@pytest.mark.campaign
def test_a_run_that_goes_on_is_one_run_of_each_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "trackio"):
        pytest.importorskip(name)
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(3000)))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    train = [sys.executable, "-m", "fivefold", "train", "run.yaml"]
    as_process([*train, "layout=single"], tmp_path)
    as_process([*train, "layout=shard2", "train.max_steps=6"], tmp_path)  # goes on from step 4

    run = tmp_path / "runs" / "tracked"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows}
    validated = {row["step"]: row["eval/loss"] for row in rows if row.get("eval/loss") is not None}
    assert list(losses) == STEPS and list(validated) == [2, 4, 6]
    ids = json.loads((run / "trackers.json").read_text())
    assert wandb_rows(run, ids["wandb"], "train/loss") == losses
    assert mlflow_rows(ids["mlflow"], "train/loss") == losses and mlflow_rows(ids["mlflow"], "eval/loss") == validated
    assert trackio_rows(tmp_path / "trackio", ids["trackio"], "train/loss") == losses
    assert tensorboard_rows(run, "train/loss") == {
        step: struct.unpack("f", struct.pack("f", loss))[0] for step, loss in losses.items()
    }
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    written = sorted((row["step"], row["prompt"], row["text"]) for row in samples)
    assert [row[0] for row in written] == [2, 2, 4, 4, 6, 6]
    assert wandb_samples(run) == mlflow_samples(ids["mlflow"]) == written
    assert trackio_samples(tmp_path / "trackio") == written
    assert tensorboard_texts(run) == [(step, "".join(f"    {line}\n" for line in f"{prompt}{text}".split("\n")))
                                      for step, prompt, text in written]  # fmt: skip


def wandb_rows(run: Path, name: str, key: str) -> dict[int, float]:
    """Rows of the offline files of one run id, which `wandb sync` sends as one run."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{name}"}
    found: dict[int, float] = {}
    for data in (data for file in files for data in records(file.read_bytes())):
        record = Record.FromString(data)
        for item in record.history.item:
            if key in (item.key, "/".join(item.nested_key)):
                assert record.history.step.num not in found
                found[record.history.step.num] = json.loads(item.value_json)
    return found


def records(file: bytes) -> Iterator[bytes]:
    """Records of a file of W&B: a header of 7 bytes, then the log format of LevelDB, in blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(file):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", file[at + 4 : at + 7])
        parts += file[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def mlflow_rows(name: str, key: str) -> dict[int, float]:
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = (one for one in client.search_experiments() if one.name == "fivefold")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (name, "tracked", "FINISHED")
    assert run.data.params["train.global_batch_size"] == "4"
    points = client.get_metric_history(name, key)
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


def trackio_rows(folder: Path, name: str, key: str) -> dict[int, float]:
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as database:
        rows: list[Any] = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    found = [(step, json.loads(values)[key]) for _, step, values in rows if key in json.loads(values)]
    assert {row[0] for row in rows} == {name} and len({step for step, _ in found}) == len(found)
    return dict(found)


def tensorboard_rows(run: Path, key: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    return {point.step: point.value for point in read.Scalars(key)}


Samples = list[tuple[int, str, str]]  # step, prompt, text


def wandb_samples(run: Path) -> Samples:
    tables = [json.loads(file.read_text()) for file in run.rglob("wandb/offline-run-*/files/**/*.table.json")]
    assert all(table["columns"] == ["step", "prompt", "text"] for table in tables)
    return sorted(tuple(row) for table in tables for row in table["data"])


def mlflow_samples(name: str) -> Samples:
    import mlflow

    mlflow.set_experiment("fivefold")  # in which it looks for the run
    table = mlflow.load_table("samples.json", run_ids=[name])
    return sorted(zip(table["step"], table["prompt"], table["text"], strict=True))


def trackio_samples(folder: Path) -> Samples:
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(values) for (values,) in database.execute("select metrics from metrics")]
    found = [row["samples"]["_value"] for row in rows if "samples" in row]
    return sorted((row["step"], row["prompt"], row["text"]) for table in found for row in table)


def tensorboard_texts(run: Path) -> list[tuple[int, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    texts = [point for number in range(2) for point in read.Tensors(f"samples/{number}/text_summary")]
    return sorted((point.step, point.tensor_proto.string_val[0].decode()) for point in texts)
