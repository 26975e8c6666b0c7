"""A folder that is trained at rate 0 and exported is that of `from_pretrained(dtype="auto")` and `save_pretrained`: the
same keys, tensors, types and bits; and files that are not the model's travel along byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.checkpoint import export
from fivefold.data.tokenizer import find_tokenizer
from fivefold.models.experts import router_buffers
from fivefold.models.hf_internals import config_class, config_keys, unbuilt_layers
from tests.families import TINY
from tests.tiers import put_off
from tests.training.bodies import run_file, train

SIZES = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 256,
    "pad_token_id": None, "moe_intermediate_size": 12, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "shared_expert_intermediate_size": 12, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}  # fmt: skip
_TEXT = {key: SIZES[key] for key in (*SIZES,)[:9]}
# Families beyond those of `tests/families.py`, by what their configs need besides `SIZES`.
MORE: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "beam": {},
    "deepseek_v2": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {"num_nextn_predict_layers": 1},
    "flex_olmo": {},
    "flint": {},
    "gemma": {},
    # Text and images: the class has both parts, and processors of images.
    "gemma3 with images": {
        "model_type": "gemma3", "text_config": {**_TEXT, "sliding_window": 7},
        "vision_config": {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "glm": {},
    "glm4_moe": {"num_nextn_predict_layers": 1, "num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "gpt_bigcode": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jetmoe": {},
    "kolibri1": {},
    "laguna": {},
    "llama4_text": {},
    "mellum": {"num_mtp_layers": 1},
    "mimo_v2_flash": {},
    "minimax_m2": {},
    "moshi": {},
    "nanochat": {},
    "olmo": {},
    "opt": {},
    "phi": {},
    "qwen2_moe": {},
    "seed_oss": {},
    "solar_open": {},
    "stablelm": {},
    "vaultgemma": {},
}  # fmt: skip
FAMILIES = {**{kind: dict(TINY[kind]) for kind in TINY}, **MORE}
PROCESSORS = (  # files that travel, besides the template
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "audio_tokenizer_config.json", "chat_template.json",
)  # fmt: skip
CORE = ("deepseek_v3", "glm4_moe", "gpt_oss", "gemma2", "gpt2", "mixtral")
# Keys of a config.json that say how it was written.
_WRITTEN = {"transformers_version", "_name_or_path"}


def config_of(kind: str) -> Any:
    """The config of a small model of a family."""
    own = FAMILIES[kind]
    cls = config_class(own.get("model_type", kind))
    assert cls is not None
    named = {key: cls.attribute_map.get(key, key) for key in SIZES if key in config_keys(cls)}
    sizes = {name: SIZES[key] for key, name in named.items() if name == key or name not in {*SIZES, *own}}
    return AutoConfig.for_model(**{"model_type": kind, **sizes, **own, "eos_token_id": 256})


def origin(kind: str, folder: Path) -> dict[str, bytes]:
    """A folder as a hub has it: weights in bf16, but for what its class keeps in fp32; a tokenizer; files of
    processors; layers that predict further tokens, if the config counts some. Returns the files that only travel."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    biases = set(router_buffers(model))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, torch.nn.Parameter):
                tensor.copy_((1 if "norm" in name else 0) + 0.08 * torch.randn_like(tensor))
            elif name in biases and tensor.is_floating_point():
                tensor.copy_(6.8 + 0.25 * torch.rand_like(tensor))
    model.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    with_further_layers(model, folder)
    travels = {name: json.dumps({"of": name}).encode() for name in PROCESSORS}
    travels |= {"LICENSE": b"as it is\n", "NOTICE.txt": b"\xff", "chat_template.jinja": b"{{ messages }}"}
    tokenizer = find_tokenizer("byte", model="", corpus=(), root=folder.parent / "cache").folder
    travels |= {name: (tokenizer / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    stays = {".env": b"TOKEN=1", "notes.py": b"1 / 0", "other.bin": b"", "vocab.py": b"1 / 0", "LICENSE.py": b"1 / 0"}
    for name, content in {**travels, **stays}.items():
        (folder / name).write_bytes(content)
    return travels


def with_further_layers(model: Any, folder: Path) -> None:
    """Add the layers behind the last that the config counts: copies of it."""
    layers, last = unbuilt_layers(model), f"layers.{model.config.get_text_config().num_hidden_layers - 1}."
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if layers and last in name]:
        tensors[name.replace(last, f"layers.{model.config.get_text_config().num_hidden_layers}.")] = tensors[name] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def trained(kind: str, folder: Path, **changes: Any) -> tuple[dict[str, bytes], str, Any]:
    """The files that travel, what the run says, and the export of a run at rate 0 that starts from the family."""
    travels = origin(kind, folder / "m")
    tree = run_file(
        folder, model__name_or_path=str(folder / "m"), model__init="pretrained", tokenizer__name_or_path="auto",
        train__max_steps=1, optimizer__learning_rate=0.0, optimizer__weight_decay=0.0, precision__compute="bf16",
        data__validation=0, **changes,
    )  # fmt: skip
    ran = train(tree, 1)
    assert ran.error is None, ran.error
    return travels, ran.screen, export(folder / "run", folder / "out")


def compare(ours: Path, theirs: Path, lacks: Any = ()) -> None:
    """Both folders have the same model: keys of JSON, names, types and bits of tensors."""
    found, wanted = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, f"{name}: {found[name].dtype}, and there {tensor.dtype}"
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))), name
    for file in ("config.json", "generation_config.json"):
        here, there = (json.loads((folder / file).read_text()) for folder in (ours, theirs))
        for key in lacks if file == "config.json" else ():
            assert here.pop(key) == 0 and there.pop(key) > 0
        different = {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)} - _WRITTEN
        assert not different, [(key, here.get(key), there.get(key)) for key in different]


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind if kind in CORE else put_off(kind) for kind in FAMILIES])
def test_a_folder_goes_out_as_transformers_writes_it(tmp_path: Path, kind: str) -> None:
    travels, screen, done = trained(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    model.save_pretrained(tmp_path / "theirs")
    compare(done.path, tmp_path / "theirs", done.lacks)
    assert done.lacks == unbuilt_layers(model)
    assert not done.lacks or f"layers.{SIZES['num_hidden_layers']}." in screen
    out = {str(path.relative_to(done.path)): path.read_bytes() for path in done.path.rglob("*") if path.is_file()}
    assert {name: out.get(name) for name in travels} == travels
    assert out.keys() - travels.keys() == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
