"""What an export has of the folder that its run started from: types of tensors, files of processors and terms, the name
of the base; and nothing that merely lies there."""

import json
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoProcessor, Glm4MoeForCausalLM

import fivefold as ff
from fivefold.checkpoint import export, find_checkpoint
from fivefold.checkpoint.model_folder import hub_id
from fivefold.core.errors import UserError
from fivefold.data.tokenizer import tokenizer_files
from fivefold.launch.model import _check_weights
from fivefold.models.build import build_meta, load_model_config, weights_folder
from fivefold.models.forwards import check_lengths
from fivefold.models.hf_internals import stored_dtypes, unbuilt_layers, unexpected_keys_to_ignore
from fivefold.models.origin import FILES, Origin, copied
from fivefold.models.sources import open_weights
from fivefold.parallel.adapters.peft_folder import base_name
from tests.checkpoint.folders import OVERRIDES, hf_folder, save_run
from tests.checkpoint.test_round_trips import compare, config_of, origin, with_further_layers
from tests.commands import fivefold
from tests.parity import Case
from tests.pool import run_ranks
from tests.training.bodies import run_file, train

BIAS = "e_score_correction_bias"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


# Types ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "kept"),
    [
        ("glm4_moe", BF16, (BIAS,)), ("glm4_moe", FP32, ()), ("ernie4_5_moe", BF16, ("gate.weight", BIAS)),
        ("gpt_oss", BF16, ()), ("gpt_oss", FP16, ("norm",)), ("llama", FP16, ()),
    ],
)  # fmt: skip
def test_the_type_of_a_tensor_is_that_of_transformers(
    tmp_path: Path, kind: str, dtype: torch.dtype, kept: tuple[str, ...]
) -> None:
    """`kept`: what lies in fp32 whatever type is asked for."""
    AutoModelForCausalLM.from_config(config_of(kind), dtype=FP32).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    found = stored_dtypes(build_meta(load_model_config(tmp_path)), dtype)
    assert {name: tensor.dtype for name, tensor in theirs.items()} == found
    odd = {name for name, type_ in found.items() if type_ != dtype}
    assert odd == {name for name in found if any(part in name for part in kept)} and bool(odd) == bool(kept)


def test_a_config_without_a_type_means_that_of_its_files(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama"), dtype=BF16)
    for size in ("5GB", "20KB"):
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({key: values[key] for key in values.keys() - {"dtype"}}))
        assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == BF16
        assert build_meta(load_model_config(folder), weights=folder).config.dtype == BF16
        assert build_meta(load_model_config(folder)).config.dtype is None


@pytest.mark.full
def test_dtype_and_merge_keep_what_transformers_keeps(tmp_path: Path) -> None:
    origin("glm4_moe", tmp_path / "m")
    tree = run_file(
        tmp_path, model__name_or_path=str(tmp_path / "m"), model__init="pretrained", tokenizer__name_or_path="auto",
        train__max_steps=1, optimizer__learning_rate=0.0, optimizer__weight_decay=0.0, precision__compute="bf16",
        data__validation=0, adapter__name="lora", adapter__rank=2,
    )  # fmt: skip
    assert train(tree, 1).error is None
    before = load_file(tmp_path / "m" / "model.safetensors")
    for dtype, others in ((None, BF16), ("fp16", FP16), ("fp32", FP32)):
        done = export(tmp_path / "run", tmp_path / "merged", merge=True, dtype=dtype, force=True)
        for name, tensor in load_file(done.path / "model.safetensors").items():
            assert tensor.dtype == (FP32 if BIAS in name else others), name
            if BIAS in name or dtype is None:
                assert torch.equal(tensor, before[name]), name
    adapter = export(tmp_path / "run", tmp_path / "adapter")
    assert {tensor.dtype for tensor in load_file(adapter.path / "adapter_model.safetensors").values()} == {FP32}
    assert (adapter.path / "preprocessor_config.json").is_file() and (adapter.path / "LICENSE").is_file()
    assert not (adapter.path / "config.json").exists()
    assert export(tmp_path / "run", tmp_path / "adapter", force=True).is_adapter


def own_loop(folder: str, out: str, layout: str) -> None:
    """The export of a loop of one's own that trains nothing."""
    model = ff.parallelize(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), layout)
    assert model.layout.precision == "bf16"  # and its routers add biases that are not rounded
    assert all(buffer.dtype == FP32 for name, buffer in model.named_buffers() if BIAS in name)
    ff.export(model, out)
    model.save_pretrained(f"{out}-saved")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shard2", "pp2"])
def test_an_own_loop_exports_what_it_was_given(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "m"
    origin("glm4_moe", folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(tmp_path / "theirs")
    run_ranks(2, own_loop, str(folder), str(tmp_path / "out"), layout)
    for out in ("out", "out-saved"):
        compare(tmp_path / out, tmp_path / "theirs", {"num_nextn_predict_layers": 1})


# Tensors that the class does not read ---------------------------------------------------------------------------------


def test_layers_that_predict_further_tokens_are_known_in_a_model_of_any_depth(tmp_path: Path) -> None:
    """`transformers` names the layers of the released sizes only (46 and 92 of GLM-4.5)."""
    model = Glm4MoeForCausalLM(config_of("glm4_moe"))
    model.save_pretrained(tmp_path)
    with_further_layers(model, tmp_path)
    ours = build_meta(load_model_config(tmp_path))
    unread = open_weights(tmp_path, ours).unread
    assert unread and all(name.startswith("model.layers.3.") for name in unread)
    assert unbuilt_layers(ours) == {"num_nextn_predict_layers": 1}
    ours.config.num_nextn_predict_layers = 0
    with pytest.raises(UserError, match="not used"):
        open_weights(tmp_path, ours)


def test_layers_that_predict_further_tokens_are_those_that_the_config_counts() -> None:
    def made(*parameters: str, **values: Any) -> Any:
        """A model of a text and images: the counts stand in the section of its text."""
        text = SimpleNamespace(to_dict=lambda: values, num_hidden_layers=3)
        config = SimpleNamespace(get_text_config=lambda: text, to_dict=lambda: {"text_config": values})
        named = [(name, None) for name in parameters]
        return SimpleNamespace(
            named_parameters=lambda: named, config=config, _keys_to_ignore_on_load_unexpected=["of_its_class"]
        )

    counted = made(
        num_nextn_predict_layers=1, mtp_num_hidden_layers=1, num_mtp_layers=0, use_mtp_layers=True, mtp_width=8
    )
    assert unbuilt_layers(counted) == {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    assert unbuilt_layers(made("model.mtp.0.weight", num_mtp_layers=1)) == {}
    one, none = made(num_mtp_layers=1), made(num_mtp_layers=0)
    for name, is_ignored in {
        "model.layers.3.a": True, "layers.3.a": True, "mtp.a": True, "model.mtp_block.a": True, "of_its_class": True,
        "model.layers.30.a": False, "model.layers.4.a": False, "sublayers.3.a": False, "empty_mtp.a": False,
    }.items():  # fmt: skip
        found = [any(re.search(each, name) for each in unexpected_keys_to_ignore(model)) for model in (one, none)]
        assert found == [is_ignored, name == "of_its_class"], name


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_processor_is_loaded_from_an_export_as_from_its_origin(tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    case, run = Case("single+fp32", overrides=OVERRIDES), tmp_path / "run"
    folder = hf_folder(case, tmp_path / "hf")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(images, tokenizer, patch_size=14, image_token="<image>").save_pretrained(folder)
    run_ranks(1, save_run, case.layout, folder, run, 1)
    before, after = (AutoProcessor.from_pretrained(path) for path in (folder, export(run, tmp_path / "out").path))
    assert type(after) is type(before) is LlavaProcessor and after.to_dict() == before.to_dict()
    assert after.tokenizer("a <image>").input_ids == before.tokenizer("a <image>").input_ids


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that started from `models/base`, as its current folder has it."""
    folder, case = tmp_path_factory.mktemp("origin"), Case("single+fp32", overrides=OVERRIDES)
    base = hf_folder(case, folder / "models" / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# It\n")
    run_ranks(1, save_run, case.layout, base, folder / "runs" / "one", 12)
    return folder / "runs" / "one"


@pytest.mark.full
def test_only_files_of_the_manifest_leave(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    model = find_checkpoint(copy).model_folder
    for name in (".env", "notes.py", "preprocessor_config.json", "vocab.json", "sub/more.txt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    found = {path.name for path in export(copy, tmp_path / "out").path.rglob("*")}
    assert found == {path.name for path in export(run, tmp_path / "clean").path.rglob("*")}
    assert not found & {".env", "notes.py", "preprocessor_config.json", "vocab.json", "sub"}
    assert find_checkpoint(copy).step == 12  # and the checkpoint is whole


def test_what_travels_is_text_with_a_known_name(tmp_path: Path) -> None:
    for name in ("LICENSE", "License-2.0", "LICENSE.md", "NOTICE.txt", "processor_config.json", "chat_template.jinja",
                 "image_processor_config.json", "a_preprocessor_config.json", ".a_processor_config.json",
                 "LICENSE.py", "LICENSE.bin", ".env", "notes.py", "my_config.json", "adapter_config.json"):  # fmt: skip
        (tmp_path / name).touch()
    assert [path.name for path in copied(tmp_path)] == [
        "LICENSE", "LICENSE.md", "License-2.0", "NOTICE.txt", "a_preprocessor_config.json", "chat_template.jinja",
        "image_processor_config.json", "processor_config.json",
    ]  # fmt: skip
    assert "chat_template.jinja" not in Origin.read("a", tmp_path, with_template=False).files
    (tmp_path / "COPYING").symlink_to(__file__)
    with pytest.raises(UserError, match="not inside the folder"):
        Origin.read("a", tmp_path)
    (tmp_path / "COPYING").unlink()
    (tmp_path / "NOTICE.txt").write_bytes(bytes(2**24 + 1))
    with pytest.raises(UserError, match=r"16,777,217 bytes, and at most 16,777,216"):
        Origin.read("a", tmp_path)
    for name in ("vocab.py", ".vocab.model", "vocab.safetensors", "vocab.json"):
        (tmp_path / name).touch()
    assert [path.name for path in tokenizer_files(tmp_path)] == ["chat_template.jinja", "vocab.json"]


def test_terms_travel_whatever_their_name(tmp_path: Path) -> None:
    names = ["COPYING.rst", "LICENCE", "NOTICE.TXT", "USE_POLICY.md", "license.PDF"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "LICENSES").mkdir()  # of REUSE
    assert [path.name for path in copied(tmp_path)] == names
    for name in (*names, "README.md", "chat_template.jinja"):  # they are fetched from the hub
        assert any(fnmatchcase(name, pattern) for pattern in FILES), name
    (tmp_path / "LICENCE").write_bytes(bytes(2**24))
    assert len(Origin.read("a", tmp_path).files["LICENCE"]) == 2**24


@pytest.mark.parametrize(
    ("front", "licence"),
    [(b"license: mit", "mit"), (b"license: [mit, apache-2.0]", None), (b"license: 2", None), (b"license: ''", None),
     (b"license: [", None), (b"license: \xff", None), (b"mit", None), (b"language: de", None)],
)  # fmt: skip
def test_a_licence_is_a_word_of_the_card(tmp_path: Path, front: bytes, licence: str | None) -> None:
    (tmp_path / "README.md").write_bytes(b"---\n" + front + b"\n---\n# It\n")
    assert Origin.read("a", tmp_path).licence == licence


# The base -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_folder_does_not_become_a_hub_id_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run from `models/base` is exported where there is no such folder, or another one."""
    case = Case("single+fp32", overrides=OVERRIDES)
    base = hf_folder(case, tmp_path / "models" / "base")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "a.txt").write_text("hello world " * 99)
    tree: dict[str, Any] = {
        "model": {"name_or_path": "models/base"}, "data": {"train": "a.txt", "seq_length": 64, "validation": 0},
        "train": {"max_steps": 1, "global_batch_size": 2, "micro_batch_size": 2}, "adapter": {"name": "lora"},
        "layout": {"dp_shard": 1}, "run": {"name": "x", "dir": str(tmp_path / "runs")},
        "precision": {"compute": "fp32"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    fivefold(["train", "run.yaml", "--nproc", "1"], tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "models" / "base").mkdir(parents=True)
    (elsewhere / "models" / "base" / "README.md").write_text("---\nlicense: other\n---\n")
    for there in (elsewhere, tmp_path / "runs"):
        monkeypatch.chdir(there)
        out = export(tmp_path / "runs" / "x", tmp_path / f"out-{there.name}").path
        front = yaml.safe_load((out / "README.md").read_text().split("---")[1])
        assert "base_model" not in front and front["license"] == "mit"
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "./models/base"
    monkeypatch.chdir(tmp_path)
    assert peft.AutoPeftModelForCausalLM.from_pretrained(out).peft_config["default"].r == 16


def test_the_name_of_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Origin.read("models/base", tmp_path).hub == "models/base"
    assert hub_id(tmp_path, "models/base") == "models/base"  # a checkpoint of an earlier version
    (tmp_path / "models").mkdir()
    assert hub_id(tmp_path, "models/base") is None
    (tmp_path / "origin.json").write_text(json.dumps({"hub": "models/base"}))
    assert hub_id(tmp_path, "models/base") == "models/base"
    assert Origin.read("models/base", tmp_path).hub is None
    for name, is_local, named in (
        ("models/base", True, "./models/base"), ("models/base", False, "models/base"), ("/a/b", True, "/a/b"),
        ("base", True, "base"), ("../a/b", True, "../a/b"), ("", True, ""),
    ):  # fmt: skip
        assert base_name(name, is_local=is_local) == named


def test_a_hub_id_and_its_files_are_those_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a folder has links to blobs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    base, commit = tmp_path / "models--org--base", 40 * "a"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    (base / "snapshots" / commit).mkdir(parents=True)
    (base / "blobs").mkdir()
    for name, text in {"README.md": "---\nlicense: mit\n---\n", "LICENSE": "x", "processor_config.json": "{}"}.items():
        (base / "blobs" / name).write_text(text)
        (base / "snapshots" / commit / name).symlink_to(f"../../blobs/{name}")
    found = Origin.read("org/base", weights_folder("org/base", files=("*.json", *FILES)))
    assert found == Origin("org/base", "mit", {"LICENSE": b"x", "processor_config.json": b"{}"})


# Messages -------------------------------------------------------------------------------------------------------------


def test_a_gguf_next_to_a_config_is_named(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    (tmp_path / "model.Q4.gguf").touch()
    for look in (lambda: _check_weights("m", tmp_path), lambda: open_weights(tmp_path, build_meta(config_of("llama")))):
        with pytest.raises(UserError, match=r"GGUF \(model\.Q4\.gguf\)") as refused:
            look()
        assert "by transformers" in str(refused.value.fix)


def test_a_text_that_is_too_long_is_no_row_of_a_run() -> None:
    config = config_of("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UserError) as refused:
        check_lengths(config, 999)
    assert "keep rows and texts to 128 tokens or less" in str(refused.value.fix) and "seq_length" not in str(
        refused.value
    )
