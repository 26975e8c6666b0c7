"""Runs of an adapter: they go on under another layout, and what they leave is what `peft` and `transformers` load."""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fivefold as ff
from fivefold.checkpoint import Checkpoint, export
from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed, UserError
from fivefold.models.build import build_meta, load_model_config
from fivefold.parallel.adapters.by_hand import in_nf4
from fivefold.parallel.adapters.facts import Target
from fivefold.parallel.adapters.peft_folder import PEFT_CONFIG, WEIGHTS, PeftFolder, config_of, names_in_peft
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.adapters.sources import Merged
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.training import preflight
from tests.commands import fivefold
from tests.families import TINY
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import MODEL, Stopped, column, run_dir, run_file, same, state, train, train_alone

peft = pytest.importorskip("peft")

LORA = {"name": "lora", "rank": 4, "alpha": 16}
IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder to start from."""
    tree = run_file(tmp_path_factory.mktemp("base"), run__name="base", train__max_steps=2, checkpoint__export_hf=True)
    assert train_alone(tree).error is None
    return str(run_dir(tree) / "hf")


def tree_of(folder: Path, base: str, **changes: Any) -> dict[str, Any]:
    tree = run_file(folder, **{"optimizer__learning_rate": 1e-2, "train__max_steps": 4, **changes})
    return tree | {"model": {"name_or_path": base}, "tokenizer": {"name_or_path": base}, "adapter": LORA}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(input_ids=IDS).logits


@pytest.mark.full
def test_an_adapter_goes_on_under_another_layout(tmp_path: Path, base: str) -> None:
    alone, other = (tree_of(tmp_path, base, run__name=name, checkpoint__every=2) for name in ("alone", "other"))
    ran = train_alone(alone)
    assert ran.error is None and "adapter" in ran.screen
    assert isinstance(train_alone(other, stop_at=3).error, Stopped)
    assert train_alone(other).error is None
    assert same(state(other, 4), state(alone, 4))
    (folder,) = (run_dir(alone) / "checkpoints").glob("step-*4")
    assert all(".lora_" in name for name in Checkpoint.open(folder).source().ordered)
    moved = tree_of(tmp_path, base, run__name="moved", checkpoint__every=2)
    assert isinstance(train_alone(moved, stop_at=3).error, Stopped)
    assert train({**moved, "layout": {"tp": 2}}).error is None
    assert column(moved, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-3)


@pytest.mark.full
def test_an_exported_adapter_is_one_of_peft_and_merged_it_is_a_model(tmp_path: Path, base: str) -> None:
    tree = tree_of(tmp_path, base, run__name="lora")
    assert train_alone(tree).error is None
    done = export(run_dir(tree), tmp_path / "adapter")
    assert done.is_adapter
    assert AutoTokenizer.from_pretrained(done.path).get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    front, text = (done.path / "README.md").read_text().split("---")[1], (done.path / "README.md").read_text()
    assert (
        yaml.safe_load(front)["library_name"] == "peft"
        and 'AutoPeftModelForCausalLM.from_pretrained("adapter")' in text
    )
    assert "| adapter | LoRA of rank 4, alpha 16, on auto, " in text
    assert export(run_dir(tree), tmp_path / "adapter", force=True).bytes == done.bytes
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    merged = export(run_dir(tree), tmp_path / "merged", merge=True, dtype="fp32")
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert not merged.is_adapter and merged.check is not None and 0 < merged.check.merged < 1e-5
    right = logits(beside)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert (right - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2  # it learnt something
    rounded = export(run_dir(tree), tmp_path / "bf16", merge=True, dtype="bf16", room=2**40).check
    assert rounded is not None and 1e-4 < rounded.written < 0.1 and rounded.merged == merged.check.merged
    unchecked = export(run_dir(tree), tmp_path / "unchecked", merge=True, room=1000).check
    assert unchecked is not None and "GiB of memory" in unchecked.missing
    read = Merged.read
    with patch.object(Merged, "read", lambda self, *asked: read(self, *asked) * 1.01), pytest.raises(RunFailed):
        export(run_dir(tree), tmp_path / "wrong", merge=True)
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(UserError, match="holds weights that "):
        export(run_dir(tree), Path(base), merge=True, force=True)
    again = {**tree_of(tmp_path, base, run__name="again", train__max_steps=1, optimizer__learning_rate=0.0)}
    again["adapter"] = {**LORA, "path": str(tmp_path / "adapter")}
    assert train_alone(again).error is None
    export(run_dir(again), tmp_path / "same")
    kept = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "same")
    torch.testing.assert_close(logits(kept), right, rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "value"),
    [
        put_off("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("alora_invocation_tokens", [1, 2]),
    ],
)
def test_an_adapter_of_peft_that_means_other_weights_is_refused(
    tmp_path: Path, base: str, key: str, value: Any
) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
    setattr(config, key, value)
    config.save_pretrained(tmp_path / "other")
    tree = tree_of(tmp_path, base) | {"adapter": {**LORA, "targets": ["q_proj"], "path": str(tmp_path / "other")}}
    ran = train_alone(tree)
    assert isinstance(ran.error, UserError) and f"{key} is {value!r}" in ran.error.what and ran.error.fix


@pytest.mark.full
def test_merging_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=1)
    assert train_alone(tree).error is None
    with pytest.raises(UserError, match="has no adapter to merge"):
        export(run_dir(tree), tmp_path / "out", merge=True)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "dora"}, "dora is not built"),
        ({"name": "lora", "dropout": 1.0}, "less than 1"),
        ({"name": "lora", "rank": 0}, "greater than or equal to 1"),
        ({"rank": 4}, "rank is of an adapter, and there is none without name: lora"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({**run_file(tmp_path), "adapter": section})


@pytest.mark.full
def test_linears_that_are_not_there_are_refused(tmp_path: Path, base: str) -> None:
    tree = tree_of(tmp_path, base) | {"adapter": {**LORA, "targets": ["q_prj"]}}
    ran = train_alone(tree)
    assert isinstance(ran.error, UserError) and "is called q_prj" in ran.error.what and "q_proj" in str(ran.error.fix)


@pytest.mark.full
def test_another_adapter_is_refused_where_a_run_goes_on(tmp_path: Path, base: str) -> None:
    tree = tree_of(tmp_path, base, train__max_steps=1)
    assert train_alone(tree).error is None
    ran = train_alone({**tree, "adapter": {**LORA, "alpha": 8}})
    assert isinstance(ran.error, UserError) and "adapter.alpha" in ran.error.what


@pytest.mark.full
def test_other_weights_under_the_name_of_the_base_are_refused(tmp_path: Path, base: str) -> None:
    shutil.copytree(base, tmp_path / "base")
    tree = tree_of(tmp_path, str(tmp_path / "base"), train__max_steps=1)
    assert train_alone(tree).error is None
    weights = tmp_path / "base" / "model.safetensors"
    save_file({name: 2 * each for name, each in load_file(weights).items()}, weights, metadata={"format": "pt"})
    longer = {**tree, "train": {**tree["train"], "max_steps": 2}}
    said = f"model.name_or_path: the weights of {tmp_path / 'base'} are not those that"
    error = train_alone(longer).error
    assert isinstance(error, UserError) and said in error.what
    with pytest.raises(UserError, match="are not those that"):
        export(run_dir(tree), tmp_path / "merged", merge=True)
    with pytest.raises(UserError, match="are not those that"):
        ff.generate(run_dir(tree), "the", quiet=True)
    shutil.copy(Path(base) / "model.safetensors", weights)
    assert train_alone(longer).error is None


@pytest.mark.parametrize(("key", "value"), [("lora_bias", True), ("alora_invocation_tokens", [3]), ("use_dora", True)])
def test_a_folder_of_another_adapter_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """Of `peft`, which would change the base that it is beside (PiSSA), or leave it out at some tokens."""
    lora = Lora(rank=4, alpha=16)
    about = config_of(lora, ["q_proj"], [], base="base", is_transposed=False)
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(about | {key: value}))
    with pytest.raises(UserError, match=f"{key} is .* which is not built"):
        PeftFolder(tmp_path, lora, [])


def test_matrices_that_are_no_floating_point_numbers_are_refused(tmp_path: Path) -> None:
    lora, target = Lora(rank=4, alpha=16), Target("model.layers.0.self_attn.q_proj", 11, 13)
    about = config_of(lora, ["q_proj"], [], base="base", is_transposed=False)
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(about))
    shapes = {named: target.shapes(4)[name] for name, named in names_in_peft([target]).items()}
    for dtype in (torch.bfloat16, torch.int32):
        save_file({name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}, tmp_path / WEIGHTS)
        if dtype.is_floating_point:
            PeftFolder(tmp_path, lora, [target])
    with pytest.raises(UserError, match=r"lora_A\.weight holds I32, and an adapter is of floating-point numbers"):
        PeftFolder(tmp_path, lora, [target])


@pytest.mark.full
def test_disk_is_asked_for_the_adapter_alone(tmp_path: Path, base: str) -> None:
    tree = tree_of(tmp_path, base, run__name="disk", train__max_steps=1)
    assert train_alone(tree).error is None
    (folder,) = (run_dir(tree) / "checkpoints").glob("step-*1")
    adapter = sum(prod(shape) for shape in Checkpoint.open(folder).source().shapes.values())
    sizes = run_ranks(1, bytes_on_rank, tree)
    assert sizes == [3 * 4 * adapter]  # weights and two moments, in fp32


def bytes_on_rank(tree: dict[str, Any]) -> int:
    config = RunConfig.model_validate(tree)
    model = build_meta(load_model_config(config.model.name_or_path))
    return preflight.checkpoint_bytes(parallelize(model, Layout.parse("single"), adapter=config.adapter.lora), config)


@pytest.mark.full
def test_a_run_generates_with_its_adapter(tmp_path: Path, base: str) -> None:
    tree = tree_of(tmp_path, base, run__name="said", optimizer__learning_rate=3e-2)
    assert train_alone(tree).error is None
    export(run_dir(tree), tmp_path / "merged", merge=True, dtype="fp32")
    options = ["--prompt", "the", "--temperature", "1", "--max-new-tokens", "40", "--layout", "single+fp32"]
    said = [
        fivefold(["generate", str(name), *options], tmp_path) for name in (run_dir(tree), tmp_path / "merged", base)
    ]
    assert said[0] == said[1] != said[2]


# ---- beside experts --------------------------------------------------------------------------------------------------

OF_EXPERTS = {**LORA, "targets": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}


def with_own_experts(folder: str | Path) -> Any:
    """The model of a folder. Its own loop over experts takes any size, where a grouped matmul does not."""
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")


@pytest.mark.full
@pytest.mark.parametrize("family", [put_off("mixtral"), "gpt_oss"])  # experts [E, O, I] and [E, I, O]
def test_a_run_beside_experts(tmp_path: Path, family: str) -> None:
    """It goes on under another layout; `peft` loads what it leaves, and gives the logits of the merged model; and a run
    starts from what `peft` has written."""
    first = run_file(tmp_path, run__name="base", train__max_steps=2, checkpoint__export_hf=True)
    (tmp_path / "config.json").write_text(
        json.dumps({**MODEL, "num_hidden_layers": 3, **TINY[family], "architectures": None})
    )
    assert train_alone(first).error is None
    base = str(run_dir(first) / "hf")
    alone, moved = (
        tree_of(tmp_path, base, run__name=name, checkpoint__every=2) | {"adapter": OF_EXPERTS}
        for name in ("alone", "moved")
    )
    ran = train_alone(alone)
    assert ran.error is None
    (folder,) = (run_dir(alone) / "checkpoints").glob("step-*4")
    assert all(".lora_" in name for name in Checkpoint.open(folder).source().ordered)
    assert isinstance(train_alone(moved, stop_at=3).error, Stopped)
    assert train({**moved, "layout": {"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": True}}, 4).error is None
    assert column(moved, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-3)

    export(run_dir(alone), tmp_path / "adapter")
    export(run_dir(alone), tmp_path / "merged", merge=True, dtype="fp32")
    plain = with_own_experts(base)
    right = logits(peft.PeftModel.from_pretrained(with_own_experts(base), tmp_path / "adapter"))
    torch.testing.assert_close(logits(with_own_experts(tmp_path / "merged")), right, rtol=1e-5, atol=1e-5)
    assert (right - logits(plain)).abs().max() > 1e-2

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj"], init_lora_weights=False,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    written = peft.get_peft_model(plain, config)
    written.save_pretrained(tmp_path / "of_peft")
    again = tree_of(tmp_path, base, run__name="again", train__max_steps=1, optimizer__learning_rate=0.0)
    again |= {"adapter": {**OF_EXPERTS, "path": str(tmp_path / "of_peft")}, "layout": {"dp_shard": 2, "ep": 2}}
    assert train(again, 2).error is None
    export(run_dir(again), tmp_path / "same")
    kept = peft.PeftModel.from_pretrained(with_own_experts(base), tmp_path / "same")
    torch.testing.assert_close(logits(kept), logits(written), rtol=0, atol=0)


@pytest.mark.full
def test_what_is_no_matrix_of_experts_is_refused(tmp_path: Path, base: str) -> None:
    ran = train_alone(tree_of(tmp_path, base) | {"adapter": OF_EXPERTS})
    assert isinstance(ran.error, UserError) and "no matrix of experts of LlamaForCausalLM" in ran.error.what


# ---- a base in four bits ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_beside_four_bits(tmp_path: Path) -> None:
    """It goes on under another layout. Merged, it is what was trained: what four bits left, and the adapter."""
    wide = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    first = run_file(tmp_path, run__name="base", train__max_steps=2, checkpoint__export_hf=True)
    first["model"]["overrides"] = wide
    assert train_alone(first).error is None
    base = str(run_dir(first) / "hf")
    trees = [
        tree_of(tmp_path, base, run__name=name, checkpoint__every=2) | {"adapter": {**LORA, "quantize": "nf4"}}
        for name in ("alone", "moved")
    ]
    ran = train_alone(trees[0])
    assert ran.error is None and "the others lie in four bits (NF4)" in ran.screen
    assert isinstance(train_alone(trees[1], stop_at=3).error, Stopped)
    assert train({**trees[1], "layout": {"tp": 2}}).error is None
    assert column(trees[1], "train/loss") == pytest.approx(column(trees[0], "train/loss"), rel=1e-3)
    changed = train_alone({**trees[1], "adapter": LORA, "train": {**trees[1]["train"], "max_steps": 5}})
    assert isinstance(changed.error, UserError) and "adapter.quantize" in changed.error.what

    export(run_dir(trees[0]), tmp_path / "adapter")
    export(run_dir(trees[0]), tmp_path / "merged", merge=True, dtype="fp32")
    plain = AutoModelForCausalLM.from_pretrained(base)
    for name, module in plain.model.layers.named_modules():
        if name.endswith("_proj"):
            module.weight.data = in_nf4(module.weight.data)
    right = logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    options = ["--prompt", "the", "--temperature", "1", "--max-new-tokens", "20", "--layout", "single+fp32"]
    said = [fivefold(["generate", str(name), *options], tmp_path) for name in (run_dir(trees[0]), tmp_path / "merged")]
    assert said[0] == said[1]
