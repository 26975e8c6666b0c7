"""`layout: auto`: what is chosen is the planner's best of what the run file leaves open, and the devices are those that
are there."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.config import RunConfig, load_config, parse_config
from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.launch import cluster as of_machine
from fivefold.launch.cluster import cluster_here
from fivefold.launch.memory import Room
from fivefold.planner import of_run
from fivefold.planner.estimate import Workload, estimate_layout
from fivefold.planner.of_run import chosen, expected, facts_of_run
from fivefold.planner.search import search
from fivefold.planner.space import Space
from tests.planner.settings import facts, layouts, prices

FILE, WORKLOAD = Path("run.yaml"), Workload(2048, 16)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of `WORKLOAD`, whose model is one of the tests."""
    monkeypatch.setattr(of_run, "facts_of_run", lambda *_: facts("llama", 8))
    monkeypatch.chdir(tmp_path)
    FILE.write_text("{layout: auto, train: {global_batch_size: 16}, data: {seq_length: 2k}}")


def run(*overrides: str) -> RunConfig:
    return load_config(FILE, overrides)


GIVEN = [
    {}, {"tp": 2}, {"micro_batch_size": 2, "recompute": "full"}, {"pp": 2, "pp_schedule": "zbv"}, {"zero": 1},
    {"precision": "fp32", "dp_replicate": 2}, {"cp": 2, "dp_shard": 2}, {"micro_batch_size": 16, "dp_shard": 1},
]  # fmt: skip


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "-".join(given) or "nothing")
def test_the_space_has_all_layouts_with_what_is_given_and_no_others(given: dict[str, Any]) -> None:
    price_list = prices("llama", "4xH100")
    found = set(layouts(Space(price_list, WORKLOAD, given)))
    precision = {"precision": given.get("precision", "bf16")}
    every = (replace(layout, **precision) for layout in layouts(Space(price_list, WORKLOAD)))
    expected = {each for each in every if all(_has(each, name, value) for name, value in given.items())}
    assert found >= expected and len(found) > 0
    assert all(_has(each, name, value) for each in found for name, value in given.items())
    if "micro_batch_size" not in given:  # a large one is left out of long rows, unless it is asked for
        assert found == expected


def _has(layout: Any, name: str, value: Any) -> bool:
    """A ZeRO stage means nothing on one shard."""
    return getattr(layout, name) == value or (name == "zero" and layout.dp_shard * layout.cp == 1)


def test_the_best_that_fits_is_spelled_out() -> None:
    config, lines = chosen(run(), Cluster.parse("4xH100"))
    assert not config.is_automatic and config.layout.world == 4
    told = " ".join(" ".join(lines).split())
    assert f"layout: auto: {config.layout}, about " in told and len(lines) < 4 and max(map(len, lines)) <= 80
    assert "s a step" in told and "of 79.2 GiB a device" in told and "layouts that fit" in told
    assert parse_config(config.to_yaml()) == config and "auto: false" in config.to_yaml()
    assert config.layout == search(prices("llama", "4xH100"), WORKLOAD).best[0].layout


def test_what_the_run_file_sets_stays() -> None:
    config, _ = chosen(run("train.micro_batch_size=2", "memory.recompute=full", "layout.tp=2"), Cluster.parse("4xH100"))
    assert (config.layout.micro_batch_size, config.layout.recompute, config.layout.tp) == (2, "full", 2)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("layout.pp_split=4-4", "layout: auto does not go with layout.pp_split 4-4"),
        ("layout.sequence_parallel=false", "does not go with layout.sequence_parallel False"),
        ("layout.tp=3", "no layout of 1x4xH100 with tp 3"),
        ("train.global_batch_size=3", "global_batch_size 3"),
    ],
)
def test_what_cannot_be_chosen_is_told(override: str, what: str) -> None:
    with pytest.raises(UserError, match=what.replace(".", r"\.")):
        chosen(run(override, *(["layout.dp_shard=4"] if "batch" in override else [])), Cluster.parse("4xH100"))


def test_a_degree_that_cannot_be_is_told_and_not_the_batch() -> None:
    with pytest.raises(UserError, match="no layout of 1x4xH100 with tp 3") as caught:
        chosen(run("layout.tp=3"), Cluster.parse("4xH100"))
    assert "3" in (caught.value.fix or "") and "global_batch_size" not in (caught.value.fix or "")


def test_where_nothing_fits_it_says_what_would() -> None:
    place = Cluster.parse("2xH100")
    small = replace(place, chip=replace(place.chip, memory_gib=0.2, context_gib=0.1, communicator_gib=0.0))
    with pytest.raises(UserError, match=r"no layout fits on 1x2xH100: the smallest, .*GiB of 0.2 a device") as caught:
        chosen(run("data.seq_length=512k"), small)
    fix = caught.value.fix or ""
    assert "tokens fit, with " in fix and "is large enough, with " in fix


@pytest.mark.parametrize(("tokenizer", "vocabulary"), [("byte", 257), ("train:300", 300), ("auto", 64)])
def test_facts_have_the_vocabulary_of_the_tokenizer(tokenizer: str, vocabulary: int) -> None:
    overrides = (
        "{hidden_size: 32, intermediate_size: 48, head_dim: 8, num_hidden_layers: 2, num_attention_heads: 4, "
        "num_key_value_heads: 2, vocab_size: 64}"
    )
    config = load_config(None, [f"model.overrides={overrides}", f"tokenizer.name_or_path={tokenizer}"])
    if tokenizer != "auto":
        del config.model.overrides["vocab_size"]  # what is overridden stays
    found = facts_of_run(config)
    assert found.parameters[f"{found.anatomy.embedding}.weight"].shape == (vocabulary, 32)


def test_what_a_run_was_expected_to_be_is_its_estimate() -> None:
    config, price_list = run("layout=shard2.tp2"), prices("llama", "2x2xH100")
    about = {"device": "NVIDIA H100 80GB HBM3", "devices_per_node": 2}
    found, of = expected(config, "shard2.tp2", "cuda:0", about), estimate_layout(price_list, config.layout, WORKLOAD)
    assert (found.step_seconds, found.peak_gib, found.cluster) == (of.step_seconds, of.memory_gib, "2x2xH100")
    assert expected(config, "shard4+fp32", "cpu", {}).cluster == (  # of an earlier version
        f"1x4xcpu; the speed of a cpu is a guess until fivefold calibrate measures it; {of_run.RESIDENT}"
    )
    assert expected(config, "shard4+fp32", "cpu", {"data": {"vocabulary": "x"}}).step_seconds > 0
    with pytest.raises(UserError, match="does not know Fancy 1"):
        expected(config, "shard4", "cuda:0", {"device": "Fancy 1"})
    Path("mine.toml").write_text('cluster = "1x8xH100"\n[chip.matmul_fraction]\nbf16 = 0.01')
    measured = run("layout=shard2.tp2", "layout.hardware=mine.toml")
    assert expected(measured, "shard2.tp2", "cuda:0", about).step_seconds > found.step_seconds


def test_a_run_has_the_vocabulary_that_its_history_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def facts_of(_: RunConfig, vocabulary: int) -> Any:
        asked.append(vocabulary)
        return facts("llama", 8)

    monkeypatch.setattr(of_run, "facts_of_run", facts_of)
    expected(run("layout=shard4+fp32"), "shard4+fp32", "cpu", {"data": {"vocabulary": 300}})
    assert asked == [300]


def test_a_pretrained_model_keeps_its_own_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tokenizer trims no weights that are loaded."""
    asked: list[Any] = []
    monkeypatch.setattr(of_run, "facts_of_config", lambda *_, of_text: asked.append(of_text))
    for init in ("pretrained", "random"):
        facts_of_run(load_config(None, [f"model.init={init}", "tokenizer.name_or_path=train:300"]))
    kept, of_text = asked
    assert kept == {} and of_text["vocab_size"] == 300


# ---- the devices that are there --------------------------------------------------------------------------------------


def test_workers_on_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_machine, "room", lambda: Room(total=12 * GIB, free=GIB))
    found = cluster_here("cpu", 4, 4)
    assert (found.text, found.chip.memory_gib) == ("1x4xcpu", 3.0)
    assert cluster_here("cpu", 8, 4).text == "2x4xcpu" and cluster_here("cpu", 7, 4).text == "7x1xcpu"
    monkeypatch.setattr(of_machine, "room", lambda: None)
    assert cluster_here("cpu", 4, 4).chip.memory_gib == 8


def test_a_gpu_is_known_by_its_name_and_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="NVIDIA H200", total_memory=100 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    found = cluster_here("cuda", 16, 8)
    assert (found.text, found.chip.memory_gib) == ("2x8xH200", 100.0)
    device.name = "NVIDIA H200 MIG 1g.18gb"
    with pytest.raises(UserError, match="does not know NVIDIA H200 MIG") as caught:
        cluster_here("cuda", 1, 1)
    assert "layout.dp_shard: -1" in (caught.value.fix or "")
    Path("mine.toml").write_text('cluster = "1x8xH200"\n[chip]\nlaunch_us = 7')
    found = cluster_here("cuda", 4, 2, "mine.toml")
    assert (found.text, found.chip.launch_us, found.chip.memory_gib) == ("2x2xH200", 7, 100.0)
    with pytest.raises(UserError, match=r"layout.hardware mine.toml is of H200, and this run is on cpu"):
        cluster_here("cpu", 4, 2, "mine.toml")
