"""Hosts of a SageMaker training job: how they are found, and that their ranks train one run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import fivefold as ff
from fivefold import cli
from fivefold.core.errors import UserError
from fivefold.launch.torchrun import GRACE, Hosts, find_hosts, set_for_hosts, torchrun_command
from tests.training.bodies import column, run_file

NONE = Path("/nowhere")
# As SageMaker writes it: /opt/ml/input/config/resourceconfig.json, and SM_RESOURCE_CONFIG.
CONFIG = {
    "current_host": "algo-2", "current_instance_type": "ml.p5.48xlarge", "current_group_name": "homogeneousCluster",
    "hosts": ["algo-2", "algo-1", "algo-10"], "network_interface_name": "eth1",
    "instance_groups": [{"instance_group_name": "homogeneousCluster", "instance_type": "ml.p5.48xlarge"}],
}  # fmt: skip
HOSTS = Hosts(("algo-1", "algo-10", "algo-2"), "algo-2", "eth1")


def test_hosts_are_in_the_file_or_in_the_variables_of_a_toolkit(tmp_path: Path) -> None:
    (file := tmp_path / "resourceconfig.json").write_text(json.dumps(CONFIG))
    assert find_hosts({}, file) == HOSTS and HOSTS.rank == 2
    assert find_hosts({"SM_RESOURCE_CONFIG": json.dumps(CONFIG)}, NONE) == HOSTS
    said = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NETWORK_INTERFACE_NAME": "ens5"}
    assert find_hosts(said, NONE) == Hosts(("algo-1", "algo-2"), "algo-1", "ens5")


def test_one_host_is_like_any_machine() -> None:
    assert find_hosts({}, NONE) is None
    assert find_hosts({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, NONE) is None


@pytest.mark.parametrize(
    "said",
    [
        {"SM_HOSTS": "algo-1,algo-2", "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": "2"},
        {"SM_RESOURCE_CONFIG": "[]"},
        {"SM_HOSTS": '["algo-1", "algo-2"]'},
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-3"},
    ],
)
def test_hosts_that_cannot_be_read_are_refused(said: dict[str, str]) -> None:
    with pytest.raises(UserError, match="SM_HOSTS"):
        find_hosts(said, NONE)


def test_the_torchrun_of_a_host() -> None:
    command = torchrun_command(HOSTS, ["notes.yaml", "train.seed=7"], None, {"SM_NUM_GPUS": "8"})
    assert command[1:] == [
        *("-m", "fivefold.launch.torchrun", "--nnodes", "3", "--node-rank", "2", "--nproc-per-node", "8"),
        *("--master-addr", "algo-1", "--master-port", "7777"),
        *("-m", "fivefold.cli", "train", "notes.yaml", "train.seed=7"),
    ]
    assert "--nproc-per-node 4 " in " ".join(torchrun_command(HOSTS, [], 4, {"SM_NUM_GPUS": "8"}))
    env = {"NCCL_SOCKET_IFNAME": "efa0"}
    set_for_hosts(HOSTS, env)
    assert env == {
        "NCCL_SOCKET_IFNAME": "efa0", "GLOO_SOCKET_IFNAME": "eth1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": GRACE
    }  # fmt: skip


def test_the_command_becomes_a_torchrun_and_a_process_of_python_is_told() -> None:
    said = {"SM_RESOURCE_CONFIG": json.dumps(CONFIG), "SM_NUM_GPUS": "8"}
    with patch.dict(os.environ, said), patch("os.execv", side_effect=SystemExit(0)) as replaced:
        with pytest.raises(SystemExit):
            cli.main(("train", "train.seed=7", "--nproc", "2", "--verify"))
        assert replaced.call_args[0][1] == torchrun_command(HOSTS, ["train.seed=7", "--verify"], 2)
        with pytest.raises(UserError, match="3 hosts"):
            ff.train()


@pytest.mark.campaign
def test_two_hosts_train_one_run_and_are_stopped_saved(tmp_path: Path) -> None:
    """Each host is a process of this machine, under an address of its own. SIGTERM goes to the process that SageMaker
    has started."""
    tree = run_file(tmp_path, train__max_steps=5000, train__device="cpu", checkpoint__every=0)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    names = ["127.0.0.1", "127.0.0.2"]

    def start(here: str, *overrides: str) -> subprocess.Popen[str]:
        config = {"hosts": names, "current_host": here, "network_interface_name": "lo"}
        env = {"SM_RESOURCE_CONFIG": json.dumps(config), "FIVEFOLD_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "fivefold", "train", str(tmp_path / "run.yaml"), *overrides, "--nproc", "1"]
        return subprocess.Popen(
            command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    hosts = [start(name) for name in names]
    try:
        assert hosts[0].stdout is not None
        for line in hosts[0].stdout:
            if "step 1" in line or "step    1" in line:
                break
        for host in hosts:
            host.send_signal(signal.SIGTERM)
        said = [host.communicate(timeout=400)[0] for host in hosts]
        reached = column(tree, "step")[-1]
        assert 0 < reached < 5000 and f"stopped by SIGTERM after step {reached}" in said[0]
        hosts = [start(name, f"train.max_steps={reached + 2}") for name in names]
        said = [host.communicate(timeout=400)[0] for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], said
    finally:
        for host in hosts:
            host.kill()
    assert column(tree, "step") == list(range(1, reached + 3))
