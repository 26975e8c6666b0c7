"""What a folder means is what `transformers` makes of it: its config, its weights to the bit, the loss of the model.

The configs are in `zoo.py`, in the words of their years; weights are laid out here as other programs leave them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.checkpoint.model_folder import CONFIG, model_files
from fivefold.core.errors import UserError
from fivefold.models import sources
from fivefold.models.build import build_meta, load_model_config, weights_folder, without_dropout
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import SafetensorsFolder, open_weights
from tests.models.zoo import CONFIGS, SIZES, YARN, config_json, model_folder

LLAMA = {"model_type": "llama"}
TIED = {"model_type": "llama", "tie_word_embeddings": True}
IDS = torch.randint(97, (2, 41), generator=torch.Generator().manual_seed(3))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def without_name(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


def ours(folder: Path) -> Any:
    """The model as a run of one process would hold it."""
    model = build_meta(without_dropout(load_model_config(folder)), weights=folder)
    source, buffers = open_weights(folder, model), buffer_values(model)
    model.to_empty(device="cpu").tie_weights()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(buffers[name] if name in buffers else source.whole(name))
    return model.eval()


def theirs(folder: Path, dtype: Any = torch.float32) -> Any:
    """`dtype`: that of loading; then all is in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").float().eval()


@torch.no_grad()
def loss(model: Any) -> float:
    logits = model(IDS).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()).item()


def stored(folder: Path) -> dict[str, Tensor]:
    """What fivefold reads of a folder, in the type of the file."""
    source = open_weights(folder, build_meta(load_model_config(folder), weights=folder))
    return {name: source.whole(name) for name in source.names()}


def as_loaded(folder: Path) -> dict[str, Tensor]:
    """What `from_pretrained` holds, in the type of the file."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE, metadata={"format": "pt"}
    )


# Configs --------------------------------------------------------------------------------------------------------------


def test_a_config_is_that_of_autoconfig_and_goes_out_as_it_came_in(subtests: pytest.Subtests, tmp_path: Path) -> None:
    assert len({values["model_type"] for values in CONFIGS.values()}) >= 20
    for name, values in CONFIGS.items():
        with subtests.test(msg=name):
            folder = config_json(tmp_path / "in", values)
            expected, found = AutoConfig.from_pretrained(folder), load_model_config(folder)
            assert type(found) is type(expected) and found.to_dict() == expected.to_dict()
            (tmp_path / "out").mkdir(exist_ok=True)
            written = model_files(found, model_class="X", dtype="float32", tokenizer=None)[CONFIG]
            (tmp_path / "out" / CONFIG).write_bytes(written)
            changed = {"architectures": ["X"], "dtype": "float32"}
            again = AutoConfig.from_pretrained(tmp_path / "out")
            assert without_name(again) == without_name(expected) | changed


# In every run.
LOUD = ("olmo 3, yarn", "gemma 3, old words", "phi 3.5", "phi 3.5 with experts", "qwen3, theta beside parameters",
        "gpt-neox")  # fmt: skip


@pytest.mark.parametrize("names", [LOUD, pytest.param([*CONFIGS], marks=pytest.mark.full)], ids=["some", "all"])
def test_the_first_loss_is_that_of_transformers(names: list[str], subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, name in enumerate(names):
        with subtests.test(msg=name):
            folder = model_folder(tmp_path / str(number), CONFIGS[name])
            assert loss(ours(folder)) == pytest.approx(loss(theirs(folder)), abs=1e-6)
            shutil.rmtree(folder)


def test_the_settings_of_the_zoo_are_heard(tmp_path: Path) -> None:
    """A rotary setting that were dropped would change the loss by far more than 1e-6."""
    for name, without in (
        ("olmo 3, yarn", "rope_scaling"),
        ("gemma 3, old words", "rope_scaling"),
        ("phi", "partial_rotary_factor"),
    ):
        folder = model_folder(tmp_path / name, CONFIGS[name])
        expected = loss(theirs(folder))
        config_json(folder, {key: value for key, value in CONFIGS[name].items() if key != without})
        assert abs(loss(theirs(folder)) - expected) > 1e-3, name


# Overrides ------------------------------------------------------------------------------------------------------------

OLMO3 = {"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN}
TAKEN: list[tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any], Any]] = [
    (LLAMA, {"rope_theta": 7.0}, lambda c: c.rope_parameters, {"rope_type": "default", "rope_theta": 7.0}),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"factor": 4.0}},
     lambda c: c.rope_parameters, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    ({**LLAMA, "rope_scaling": YARN}, {"rope_scaling": None}, lambda c: c.rope_parameters,
     {"rope_type": "default", "rope_theta": 1e4}),
    ({**LLAMA, "rope_scaling": YARN}, {"rope_parameters": {"type": "linear", "factor": 2.0}},
     lambda c: c.rope_parameters, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ({**LLAMA, "rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 6.0}}, {"rope_theta": 7.0},
     lambda c: c.rope_parameters["rope_theta"], 7.0),
    (OLMO3, {"rope_parameters": {"full_attention": {"factor": 8.0}}}, lambda c: c.rope_parameters,
     {"full_attention": {**YARN, "factor": 8.0, "rope_theta": 5e5},
      "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}),
    (OLMO3, {"rope_scaling": {"sliding_attention": {"rope_theta": 3.0}}},
     lambda c: c.rope_parameters["sliding_attention"], {"rope_type": "default", "rope_theta": 3.0}),
    (CONFIGS["gemma 3, by layer type"],
     {"num_hidden_layers": 1, "rope_parameters": {"full_attention": {"factor": 3.0}}},
     lambda c: (c.layer_types, c.rope_parameters["full_attention"]["factor"]), (["sliding_attention"], 3.0)),
    ({"model_type": "olmo3", "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3.0}}},
     {"rope_parameters": {"full_attention": {"factor": 8.0}}},
     lambda c: [each["rope_theta"] for each in c.rope_parameters.values()], [5e5, 3.0]),
    # A class with a key of that name beside `rope_parameters`: of two values one would be another model's.
    ({"model_type": "cohere2_moe"}, {"rope_theta": 7.0},
     lambda c: (c.rope_theta, c.rope_parameters["rope_theta"]), (7.0, 7.0)),
    ({"model_type": "cohere2_moe", "rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 7.0}},
     lambda c: (c.rope_theta == 5.0, c.rope_parameters["rope_theta"]), (False, 7.0)),
    (CONFIGS["gpt-neox"], {"rotary_emb_base": 7.0}, lambda c: c.rope_parameters["rope_theta"], 7.0),
    (CONFIGS["gpt-neox"], {"rotary_pct": 0.5}, lambda c: c.rope_parameters["partial_rotary_factor"], 0.5),
    (CONFIGS["phi"], {"partial_rotary_factor": 0.25}, lambda c: c.rope_parameters["partial_rotary_factor"], 0.25),
    (CONFIGS["gpt-2"], {"num_hidden_layers": 3, "hidden_size": 8}, lambda c: (c.n_layer, c.n_embd), (3, 8)),
    (CONFIGS["smollm 3"], {"num_hidden_layers": 3}, lambda c: c.no_rope_layers, [1, 0, 1]),
    ({**LLAMA, "torch_dtype": "float16"}, {"dtype": "bfloat16"}, lambda c: c.dtype, torch.bfloat16),
    ({**LLAMA, "dtype": "float16"}, {"torch_dtype": "bfloat16"}, lambda c: c.dtype, torch.bfloat16),
    ({"model_type": "gemma3", "text_config": {**SIZES, "model_type": "gemma3_text"}},
     {"text_config": {"num_hidden_layers": 2, "rope_parameters": {"full_attention": {"rope_theta": 9.0}}}},
     lambda c: (len(c.text_config.layer_types), c.text_config.rope_parameters["full_attention"]["rope_theta"]),
     (2, 9.0)),
]  # fmt: skip


def test_an_override_changes_what_the_config_says(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for values, overrides, asked, expected in TAKEN:
        with subtests.test(values=values["model_type"], overrides=overrides):
            found = load_model_config(config_json(tmp_path, values), overrides)
            assert asked(found) == expected
            written = model_files(found, model_class="X", dtype="float32", tokenizer=None)[CONFIG]
            (tmp_path / CONFIG).write_bytes(written)
            assert asked(AutoConfig.from_pretrained(tmp_path)) == expected or "torch.bfloat16" in str(expected)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (OLMO3, {"rope_theta": 7.0}, "has by layer type: sliding_attention, full_attention"),
    (OLMO3, {"rope_scaling": {"factor": 7.0}}, "by layer type"),
    (OLMO3, {"rope_parameters": {"chunked_attention": {"rope_theta": 1.0}}}, "sets chunked_attention"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for all layers alike"),
    (CONFIGS["gpt-2"], {"rope_theta": 7.0}, "not a key of this model's config"),
    (CONFIGS["phi 3.5"], {"rope_scaling": {"original_max_position_embeddings": 32}}, "has no effect"),
]  # fmt: skip


def test_an_override_without_effect_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for values, overrides, reason in REFUSED:
        with subtests.test(values=values["model_type"], overrides=overrides), pytest.raises(UserError, match=reason):
            load_model_config(config_json(tmp_path, values), overrides)


# Weights --------------------------------------------------------------------------------------------------------------


def same(folder: Path) -> None:
    """Every tensor to the bit, and the loss."""
    found, expected = stored(folder), as_loaded(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert loss(ours(folder)) == pytest.approx(loss(theirs(folder, "auto")), abs=1e-6)


def test_weights_are_read_to_the_bit(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for dtype, how in ((torch.float32, {}), (torch.bfloat16, {"max_shard_size": "40KB"}), (torch.float16, {})):
        with subtests.test(dtype=str(dtype), how=how):
            values = {**LLAMA, "dtype": str(dtype).removeprefix("torch.")}
            folder = model_folder(tmp_path / str(dtype), values, dtype, **how)
            assert (folder / INDEX).is_file() == bool(how)
            same(folder)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, LLAMA)
    tensors = load_file(folder / SINGLE)
    half = {name: tensor / 2 for name, tensor in tensors.items()}
    save_file(half, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    same(folder)
    assert torch.equal(stored(folder)["model.norm.weight"], tensors["model.norm.weight"])


def test_a_head_of_its_own_stays_apart_from_the_embedding(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TIED)
    head = 0.3 * torch.randn(97, 32, generator=torch.Generator().manual_seed(2))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    same(folder)
    assert torch.equal(stored(folder)["lm_head.weight"], head)
    model = build_meta(load_model_config(folder), weights=folder)
    assert model.config.tie_word_embeddings is False and load_model_config(folder).tie_word_embeddings is True
    with pytest.raises(UserError, match=r"lm_head\.weight is not the tensor that this model ties it to"):
        SafetensorsFolder(folder, build_meta(load_model_config(folder)))


def test_a_head_that_differs_in_its_last_row_is_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_COMPARED", 64)  # two rows at once
    folder = model_folder(tmp_path, TIED)
    head = load_file(folder / SINGLE)["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert torch.equal(stored(folder)["lm_head.weight"], head)


def test_a_head_that_is_the_embedding_is_tied(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TIED)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    same(folder)
    assert "lm_head.weight" not in stored(folder)


def test_a_tied_tensor_may_have_the_name_of_the_head(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TIED)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    same(folder)


def test_a_link_inside_of_the_folder_is_followed_and_one_that_leaves_it_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    (folder / "elsewhere").mkdir()
    (folder / SINGLE).rename(folder / "elsewhere" / "blob")
    (folder / SINGLE).symlink_to("elsewhere/blob")
    same(folder)
    (folder / "elsewhere" / "blob").rename(tmp_path / "blob")
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(tmp_path / "blob")
    with pytest.raises(UserError, match=rf"model\.safetensors is a link to {tmp_path}/blob, which is not inside"):
        stored(folder)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several"])
def test_a_number_that_is_none_is_named_with_its_file(tmp_path: Path, how: dict[str, Any]) -> None:
    folder, name = model_folder(tmp_path, LLAMA, **how), "model.layers.2.mlp.up_proj.weight"
    file = next(each for each in sorted(folder.glob("*.safetensors")) if name in load_file(each))
    tensors = load_file(file)
    tensors[name][3, 5:7] = torch.nan
    tensors["model.norm.weight" if "model.norm.weight" in tensors else name][0] = torch.inf  # not a NaN
    save_file(tensors, file, metadata={"format": "pt"})
    source = SafetensorsFolder(folder, build_meta(load_model_config(folder)))
    with pytest.raises(
        UserError, match=rf"{file.name}: {name} is not all numbers: \d+ of the 1,408 values read are NaN"
    ) as error:
        source.whole(name)
    assert "download the file again" in str(error.value)
    assert source.read(name, (slice(4, 9), slice(None))).shape == (5, 32)  # a rank that does not hold it


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    """`transformers` applies it (where `peft` is installed): the base alone is another model. `generate` and `evaluate`
    read both (`tests/generation/test_run.py`)."""
    folder = model_folder(tmp_path, LLAMA)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(UserError, match=r"holds an adapter \(adapter_config\.json\) beside the model's weights"):
        weights_folder(folder)
    assert weights_folder(folder, reads_adapter=True) == folder


# Quantised ------------------------------------------------------------------------------------------------------------


def renamed(suffixes: dict[str, torch.dtype]) -> Callable[[dict[str, Tensor]], None]:
    """Linears in the names and types of a method's files; the values do not matter."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if "_proj.weight" in each]:
            tensors.pop(name)
            tensors |= {
                name.replace("weight", suffix): torch.zeros(4, 4).to(dtype) for suffix, dtype in suffixes.items()
            }

    return change


QUANTISED: dict[str, tuple[dict[str, Any], dict[str, torch.dtype]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, {"qweight": torch.int32, "scales": torch.float16}),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, {"qweight": torch.int32, "qzeros": torch.int32}),
    "bitsandbytes": ({"load_in_4bit": True}, {"weight": torch.uint8, "weight.absmax": torch.float32}),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"weight_packed": torch.int32, "weight_scale": torch.bfloat16},
    ),
}  # fmt: skip


def test_what_other_packages_make_plain_is_refused_by_its_method(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for method, (given, suffixes) in QUANTISED.items():
        with subtests.test(msg=method):
            folder = model_folder(tmp_path / method, {**LLAMA, "quantization_config": given})
            rewrite(folder, renamed(suffixes))
            with pytest.raises(UserError, match=rf"quantised \({method}\)") as error:
                stored(folder)
            assert "the folder that it was made of" in str(error.value)


def test_a_method_that_stands_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, LLAMA)
    rewrite(folder, renamed({"qweight": torch.int32}))
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(UserError, match=r"quantised \(gptq\)"):
        stored(folder)


@pytest.mark.parametrize("method", QUANTISED)
def test_plain_weights_under_a_stale_method_are_plain_and_go_out_without_it(tmp_path: Path, method: str) -> None:
    folder = model_folder(tmp_path, LLAMA)
    expected = loss(theirs(folder))
    config_json(folder, {**LLAMA, "quantization_config": QUANTISED[method][0]})
    model = ours(folder)
    assert loss(model) == pytest.approx(expected, abs=1e-6)
    assert b"quantization_config" not in model_files(model.config, model_class="X", dtype="", tokenizer=None)[CONFIG]


def test_fp8_is_made_plain_as_transformers_does(tmp_path: Path) -> None:
    given = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    folder = model_folder(tmp_path, {**LLAMA, "dtype": "bfloat16", "intermediate_size": 48}, torch.bfloat16)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if "_proj.weight" in each]:
            out, into = tensors[name].shape
            blocks = tensors[name].float().reshape(out // 16, 16, into // 16, 16)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[name] = (blocks / scale).reshape(out, into).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0]

    before = loss(theirs(folder))
    rewrite(folder, quantise)
    values = {**LLAMA, "dtype": "bfloat16", "intermediate_size": 48, "quantization_config": given}
    config_json(folder, values)
    same(folder)
    assert loss(ours(folder)) == pytest.approx(before, abs=0.05)  # three bits of mantissa


def test_mxfp4_is_made_plain_as_transformers_does(tmp_path: Path) -> None:
    values = {**CONFIGS["gpt-oss"], "dtype": "bfloat16", "intermediate_size": 32}
    folder = model_folder(tmp_path, values, torch.bfloat16)
    generator = torch.Generator().manual_seed(4)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
            experts, into, out = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, out, into // 32, 16), generator=generator).byte()
            tensors[f"{name}_scales"] = torch.randint(120, 126, (experts, out, into // 32), generator=generator).byte()

    rewrite(folder, quantise)
    config_json(folder, {**values, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}})
    same(folder)
