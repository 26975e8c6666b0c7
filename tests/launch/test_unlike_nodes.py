"""Two nodes as processes of this machine, whose model folders hold other weights at one relative path: none trains."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.bodies import MODEL, run_dir, run_file

WAYS = [
    pytest.param("torchrun", marks=pytest.mark.full),
    pytest.param("nodes", marks=pytest.mark.campaign),
    pytest.param("sagemaker", marks=pytest.mark.campaign),
]


def command(way: str, file: Path, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """How a node starts, and its environment."""
    train = ["train", str(file), "train.device=cpu"]
    if way == "nodes":
        return [sys.executable, "-m", "fivefold", *train, "train.nodes=2", "layout=shard-1", "--nproc", "1"], {}
    if way == "sagemaker":
        names = ["127.0.0.1", "127.0.0.2"]
        config = {"hosts": names, "current_host": names[node], "network_interface_name": "lo"}
        env = {"SM_RESOURCE_CONFIG": json.dumps(config), "SM_MASTER_PORT": str(port)}
        return [sys.executable, "-m", "fivefold", *train, "--nproc", "1"], env
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [sys.executable, "-m", "fivefold.launch.torchrun", *place, "-m", "fivefold.cli", *train], {}


@pytest.mark.parametrize("way", WAYS)
def test_nodes_with_other_weights_end_before_the_first_step(way: str, tmp_path: Path) -> None:
    tree = run_file(tmp_path) | {"model": {"name_or_path": "model", "init": "pretrained"}}
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = []
    for node in range(2):
        torch.manual_seed(node)
        plain = {key: value for key, value in MODEL.items() if key not in ("model_type", "architectures")}
        LlamaForCausalLM(LlamaConfig(**plain)).save_pretrained(tmp_path / f"node{node}" / "model")
        argv, env = command(way, file, node, port)
        env = {**os.environ, **env, "FIVEFOLD_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(argv, cwd=tmp_path / f"node{node}", env=env, stdout=-1, stderr=-2, text=True))
    try:
        said, ends = [], []
        for process in started:
            said.append(process.communicate(timeout=120)[0])
            ends.append(time.monotonic())
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [2, 2], said
    assert ends[1] - ends[0] < 10
    what = "model.name_or_path model: weights: model.safetensors: lm_head.weight is "
    assert all(what in text and socket.gethostname() in text for text in said), said
    assert not (run_dir(tree) / "metrics.jsonl").exists()
