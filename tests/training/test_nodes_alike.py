"""Two ranks whose machines hold other files under the same names: each is refused before the first step, and named."""

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import fivefold as ff
from fivefold.config import RunConfig
from fivefold.core import alike
from fivefold.core.errors import NodesDiffer, UserError
from fivefold.data import prepare
from fivefold.data.tokenizer import _byte_tokenizer, _save
from fivefold.evaluation import EvaluateRequest
from fivefold.evaluation.run import evaluate
from fivefold.generation import GenerateRequest
from fivefold.generation.run import generate
from fivefold.launch.world import World
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.sources import open_weights
from fivefold.parallel.adapters.peft_folder import PEFT_CONFIG, WEIGHTS
from fivefold.training import nodes
from fivefold.training.preflight import agreed_files
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import MODEL, Ran, on_rank, run_dir, run_file, write_corpus

pytestmark = pytest.mark.full
HOST = socket.gethostname()
ON = f" on rank 0 ({HOST}), and "
LOSS = """import torch.nn.functional as F


def loss(logits, labels, row):
    return F.cross_entropy(logits, labels, reduction="none")
"""
PAIR = {"prompt": "a b", "chosen": " c d e", "rejected": " f g h"}


def model(folder: Path, seed: int = 1) -> None:
    """A model of two files with its tokenizer and a chat template."""
    torch.manual_seed(seed)
    plain = {key: value for key, value in MODEL.items() if key not in ("model_type", "architectures")}
    made = LlamaForCausalLM(LlamaConfig(**plain))
    made.generation_config = GenerationConfig(eos_token_id=256)
    made.save_pretrained(folder, max_shard_size="20KB")
    _save(_byte_tokenizer(), folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine holds."""
    folder = tmp_path_factory.mktemp("node")
    for number, name in enumerate(("model", "reference", "teacher")):
        model(folder / name, number)
    write_corpus(folder / "corpus.txt", 4001)
    (folder / "pairs.jsonl").write_text(f"{json.dumps(PAIR)}\n" * 9)
    (folder / "my_loss.py").write_text(LOSS)
    (folder / "adapter").mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter" / PEFT_CONFIG).write_text(json.dumps(about))
    save_file({"a": torch.ones(3)}, folder / "adapter" / WEIGHTS)
    return folder


def tree_of(folder: Path, **more: Any) -> dict[str, Any]:
    """A run file whose paths are relative: each node's own."""
    tree = run_file(folder, **{"train__max_steps": 2, "data__train": "corpus.txt", **more})
    tree["model"] = {"name_or_path": "model", "init": "pretrained"}
    tree["tokenizer"] = {"name_or_path": "auto"}
    return tree


def on_node(nodes: list[str], tree: dict[str, Any], own_code: dict[str, str] | None = None) -> Ran:
    """Train on this rank, in the folder of its node."""
    rank = dist.get_rank()
    with chdir(nodes[rank]), patch.object(alike, "_own_code", lambda: own_code if own_code and rank else {}):
        return on_rank(tree)


def refused(nodes: list[Path], tree: dict[str, Any], *more: Any) -> str:
    """The one error of all ranks: before the first step."""
    errors = [ran.error for ran in run_ranks(len(nodes), on_node, [*map(str, nodes)], tree, *more)]
    (said,) = {str(error) for error in errors}
    assert all(type(error) in (UserError, NodesDiffer) and error.exit_code == 2 for error in errors)
    assert not (run_dir(tree) / "metrics.jsonl").exists()
    return said


def one_byte(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edited(file: Path, **more: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


LORA = {"adapter__name": "lora", "adapter__rank": 2, "adapter__alpha": 4, "adapter__targets": ["q_proj"]}
DPO = {"objective__name": "dpo", "data__train": "pairs.jsonl"}
OWN = {"objective__name": "python", "objective__path": "my_loss.py:loss"}
# What is done to the second node, the keys of the run, and what is said of which file.
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "a byte of a tensor": (
        lambda node: one_byte(next(iter(sorted(node.glob("model/*.safetensors")))), -2), {},
        "model.name_or_path model: weights: model-00001-of-0000",
    ),
    "other weights": (
        lambda node: model(node / "model", 7), {}, "model.name_or_path model: weights: model-00001-of-0000",
    ),
    "the config": (
        lambda node: edited(node / "model" / "config.json", rms_norm_eps=0.25), {},
        f"model.name_or_path model: config.json: rms_norm_eps is 1e-06{ON}0.25 on rank 1 ({HOST})",
    ),
    "the generation config": (
        lambda node: edited(node / "model" / "generation_config.json", eos_token_id=7), {},
        f"model.name_or_path model: generation_config.json: eos_token_id is 256{ON}7 on rank 1",
    ),
    "the tokenizer": (
        lambda node: edited(node / "model" / "tokenizer.json", pre_tokenizer=None), {},
        "the tokenizer: tokenizer.json is ",
    ),
    "the template": (
        lambda node: (node / "model" / "chat_template.jinja").write_text("{{ messages }}"), {},
        "the tokenizer: chat_template.jinja is ",
    ),
    "a template that is not there": (
        lambda node: (node / "model" / "chat_template.jinja").unlink(), {}, f"not there on rank 1 ({HOST})",
    ),
    "the text": (
        lambda node: write_corpus(node / "corpus.txt", 4001, seed=4), {},
        "the fingerprint of the rows: data.train: corpus.txt is ",
    ),
    "a text that is streamed": (
        lambda node: write_corpus(node / "corpus.txt", 4003, seed=4), {"data__streaming": True, "data__validation": 0},
        "the fingerprint of the rows: data.train: corpus.txt is ",
    ),
    "the code": (lambda node: (node / "my_loss.py").write_text(f"{LOSS}\n"), OWN, "the hash of objective.path is "),
    "the adapter": (
        lambda node: save_file({"a": torch.zeros(3)}, node / "adapter" / WEIGHTS), LORA | {"adapter__path": "adapter"},
        f"adapter.path adapter: weights: {WEIGHTS}: a is ",
    ),
    "the settings of the adapter": (
        lambda node: edited(node / "adapter" / PEFT_CONFIG, lora_alpha=8), LORA | {"adapter__path": "adapter"},
        f"adapter.path adapter: {PEFT_CONFIG}: lora_alpha is 4{ON}8",
    ),
    "the reference": (
        lambda node: model(node / "reference", 7), DPO | {"objective__reference": "reference"},
        "objective.reference reference: model-00001-of-0000",
    ),
    "the teacher": (
        lambda node: model(node / "teacher", 7), {"objective__name": "distill", "objective__teacher": "teacher"},
        "objective.teacher teacher: model-00001-of-0000",
    ),
    "a file that one node lacks": (
        lambda node: next(iter(node.glob("model/model-00001*"))).unlink(), {},
        f"rank 1 ({HOST}): model lacks model-00001-of-0000",
    ),
}  # fmt: skip


# What another of the cases names in the same way.
RARE = {
    "other weights",
    "the generation config",
    "the template",
    "the text",
    "the settings of the adapter",
    "the teacher",
}


@pytest.mark.parametrize("what", [put_off(what) if what in RARE else what for what in CASES])
def test_each_thing_that_differs_is_named(what: str, node: Path, tmp_path: Path) -> None:
    change, keys, said = CASES[what]
    shutil.copytree(node, other := tmp_path / "other")
    change(other)
    found = refused([node, other], tree_of(tmp_path, **keys))
    assert said in found, found
    assert "give every node the same" in found or "rank 1 (" in found


def test_another_commit_of_fivefold_is_named(node: Path, tmp_path: Path) -> None:
    found = refused([node, node], tree_of(tmp_path), {"training/step.py": "1f"})
    assert f"fivefold's own code: training/step.py is not there{ON}1f on rank 1 ({HOST})" in found


def test_of_three_nodes_those_that_differ_are_named(node: Path, tmp_path: Path) -> None:
    shutil.copytree(node, other := tmp_path / "other")
    model(other / "model", 7)
    tree = tree_of(tmp_path) | {"layout": {"dp_shard": 4}}
    assert f" on rank 0 ({HOST}), and " in (found := refused([node, other, node, other], tree))
    assert f" on rank 1, 3 ({HOST})" in found


def test_copies_in_other_files_are_alike_and_a_run_that_goes_on_needs_no_first_weights(
    node: Path, tmp_path: Path
) -> None:
    shutil.copytree(node, other := tmp_path / "other")
    LlamaForCausalLM.from_pretrained(node / "model").save_pretrained(other / "whole")  # in one file
    for file in (*other.glob("model/*.safetensors"), other / "model" / "model.safetensors.index.json"):
        file.unlink()
    shutil.move(other / "whole" / "model.safetensors", other / "model")
    edited(other / "model" / "generation_config.json", transformers_version="4.0.0")
    tree = tree_of(tmp_path)
    assert [ran.error for ran in run_ranks(2, on_node, [str(node), str(other)], tree)] == [None, None]
    weights = load_file(other / "model" / "model.safetensors")
    save_file({name: 2 * each for name, each in weights.items()}, other / "model" / "model.safetensors")
    longer = tree_of(tmp_path, train__max_steps=3)
    ran = run_ranks(2, on_node, [str(node), str(other)], longer)
    assert [each.error for each in ran] == [None, None] and "step 3/3" in ran[0].screen


def read_by(folder: Path, tree: dict[str, Any], begins: bool) -> Mapping[str, Any]:
    """What a node reads to be compared."""
    with chdir(folder):
        config = RunConfig.model_validate(tree)
        return agreed_files(config, prepare(config, cache=folder / "cache"), begins=begins)


TEACHER = {"objective__name": "distill", "objective__teacher": "teacher"}
# What is done to the second node, the keys of the run, and what then differs in a run that begins, and in one that goes
# on from a checkpoint.
READ: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str, str]] = {
    "the config of the teacher": (
        lambda node: edited(node / "teacher" / "config.json", rms_norm_eps=0.25), TEACHER,
        "objective.teacher teacher: config.json: rms_norm_eps", "objective.teacher teacher: config.json: rms_norm_eps",
    ),
    "the tokenizer of the teacher": (
        lambda node: edited(node / "teacher" / "tokenizer.json", pre_tokenizer=None), TEACHER,
        "objective.teacher teacher: the tokenizer: tokenizer.json",
        "objective.teacher teacher: the tokenizer: tokenizer.json",
    ),
    "the weights": (lambda node: model(node / "model", 7), {}, "model.name_or_path model: weights", ""),
    "the base of an adapter": (
        lambda node: model(node / "model", 7), LORA, "model.name_or_path model: weights",
        "model.name_or_path model: weights",
    ),
    "the reference": (
        lambda node: model(node / "model", 7), DPO, "model.name_or_path model: weights",
        "model.name_or_path model: weights",
    ),
    "the first adapter": (
        lambda node: save_file({"a": torch.zeros(3)}, node / "adapter" / WEIGHTS), LORA | {"adapter__path": "adapter"},
        "adapter.path adapter: weights", "",
    ),
}  # fmt: skip


def test_a_run_that_goes_on_reads_what_it_still_computes_with(
    node: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for number, (what, (change, keys, of_first_step, of_later)) in enumerate(READ.items()):
        with subtests.test(msg=what):
            shutil.copytree(node, other := tmp_path / f"other-{number}")
            change(other)
            tree = tree_of(tmp_path, **keys)
            for begins, expected in ((True, of_first_step), (False, of_later)):
                found = alike.difference(*(read_by(folder, tree, begins) for folder in (other, node)))
                assert (found or [""])[0].startswith(expected) and bool(found) == bool(expected), found


def test_the_first_rank_says_whether_a_run_begins(node: Path, tmp_path: Path) -> None:
    """A folder of an earlier run on another node keeps no weights from being compared."""
    shutil.copytree(node, other := tmp_path / "other")
    model(other / "model", 7)
    tree = tree_of(tmp_path) | {"run": {"name": "run", "dir": "runs"}}
    (other / "runs" / "run" / "checkpoints" / "step-000002").mkdir(parents=True)
    ran = run_ranks(2, on_node, [str(node), str(other)], tree)
    assert all("model.name_or_path model: weights" in str(each.error) for each in ran)


class Met(Exception):
    """What a node tells the others when it comes."""


def told_by(folder: Path, tree: dict[str, Any]) -> Mapping[str, Any]:
    def meeting(*_: Any, about: Mapping[str, Any], **__: Any) -> None:
        raise Met(about)

    with chdir(folder), patch.object(nodes, "Meeting", meeting), pytest.raises(Met) as met:
        config = RunConfig.model_validate(tree)
        data = prepare(config, cache=folder / "cache")
        nodes.train(config, Mock(), None, data=data, settle=lambda settled, *_: settled, prove=None)
    return cast(Mapping[str, Any], met.value.args[0])


def test_a_node_that_comes_once_there_is_a_checkpoint_tells_its_first_weights(node: Path, tmp_path: Path) -> None:
    """If the checkpoints are removed, the next round reads them. A node that no longer has them may take part."""
    tree = tree_of(tmp_path, train__nodes="1:2")
    first = told_by(node, tree)
    (run_dir(tree) / "checkpoints" / "step-000002").mkdir(parents=True)
    for seed, expected in ((0, None), (7, "model.name_or_path model: weights: model-00001-of-0000")):
        shutil.copytree(node, other := tmp_path / f"other-{seed}")
        model(other / "model", seed)
        found = alike.difference(told_by(other, tree), first)
        assert (found is None) == (expected is None) and (found is None or found[0].startswith(str(expected)))
    for file in other.glob("model/*.safetensors"):
        file.unlink()
    assert alike.difference(told_by(other, tree), first) is None


# ---- other commands --------------------------------------------------------------------------------------------------


def tried(nodes: list[str], verb: str) -> str:
    """The refusal of a command, or of a loop of one's own, in the folder of this rank's node."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    with chdir(nodes[dist.get_rank()]), pytest.raises(UserError) as caught:
        if verb == "generate":
            generate(GenerateRequest(model="model", prompt="a", layout="tp2"), world)
        elif verb == "evaluate":
            evaluate(EvaluateRequest(model="model", text="corpus.txt", layout="tp2"), world)
        elif verb == "parallelize":
            made = build_meta(load_model_config("model"))
            ff.parallelize(made, "tp2", source=open_weights("model", made))
        else:
            ff.parallelize(LlamaForCausalLM.from_pretrained("model"), "tp2")
    return caught.value.what


@pytest.mark.parametrize("verb", ["generate", "parallelize", *map(put_off, ("evaluate", "from_pretrained"))])
def test_commands_and_own_loops_refuse_other_weights(verb: str, node: Path, tmp_path: Path) -> None:
    shutil.copytree(node, other := tmp_path / "other")
    one_byte(next(iter(sorted(other.glob("model/*.safetensors")))), -2)
    (said,) = set(run_ranks(2, tried, [str(node), str(other)], verb))
    assert f"{ON}" in said and f"on rank 1 ({HOST})" in said, said
    assert verb == "from_pretrained" or "model-00001-of-0000" in said


def test_evaluate_refuses_another_text(node: Path, tmp_path: Path) -> None:
    shutil.copytree(node, other := tmp_path / "other")
    write_corpus(other / "corpus.txt", 4001, seed=4)
    (said,) = set(run_ranks(2, tried, [str(node), str(other)], "evaluate"))
    assert said.startswith("corpus.txt is ")
