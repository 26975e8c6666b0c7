"""The model of a run: its config fitted to the tokenizer, the source of its weights, whether compiling pays off."""

import shutil
from typing import Any

from transformers import PreTrainedModel

from fivefold.checkpoint.agreement import base_source
from fivefold.config import RunConfig
from fivefold.data.prepare import PreparedData
from fivefold.launch.model import check_positions, check_tokens
from fivefold.launch.world import World
from fivefold.models import hf_internals, origin
from fivefold.models.build import build_meta, load_model_config, weights_folder
from fivefold.models.facts import ModelFacts
from fivefold.models.flops import Costs
from fivefold.models.forwards import check_lengths
from fivefold.models.sources import TensorSource
from fivefold.parallel.adapters.peft_folder import with_peft_folder
from fivefold.parallel.balance.runtime import BalanceOptions

# On two CPU cores compiling took 7 s with a warm cache and up to 37 s without one, and saved 8 to 20% of a step (1M and
# 6M parameters, bf16 and fp32). So it pays off only in a CPU run that is long enough.
CPU_FLOPS = 100e9  # sustained by a core in training, FLOP/s: only the order of magnitude matters
PAYS_AFTER_SECONDS = 600.0


def build_model(config: RunConfig, data: PreparedData) -> PreTrainedModel:
    """The `transformers` model on the meta device.

    With a tokenizer that is not its own, a model takes the end token from it; with random weights also the vocabulary.
    `model.overrides` overrides both.

    Raises `UserError` if the tokenizer has tokens that the model lacks, or if rows are longer than its positions or its
    rotary frequencies allow.
    """
    own: dict[str, Any] = {}
    if config.tokenizer.name_or_path != "auto":
        own = {"eos_token_id": data.tokenizer.eos_token_id}
        if config.model.init == "random":
            own |= {"vocab_size": data.tokenizer.vocab_size, "bos_token_id": None, "pad_token_id": None}
    hf_config = load_model_config(config.model.name_or_path, config.model.overrides, of_text=own)
    check_tokens(data, hf_config.get_text_config().vocab_size)
    check_positions(getattr(hf_config.get_text_config(), "max_position_embeddings", None), config.data.seq_length)
    check_lengths(hf_config, config.data.seq_length)
    if config.model.init == "random":
        return build_meta(hf_config)
    # A resumed run never reads the first weights: they are fetched here only if some may be tied, or for their type.
    reads = getattr(hf_config, "tie_word_embeddings", True) or hf_config.dtype is None
    needed = ("*.safetensors", "*.json") if reads else ("*.json",)
    folder = weights_folder(config.model.name_or_path, files=(*needed, *origin.FILES))
    model = build_meta(hf_config, weights=folder)
    model.generation_config = hf_internals.generation_config(folder)
    has_own = config.tokenizer.name_or_path == "auto"
    model.origin = origin.Origin.read(config.model.name_or_path, folder, with_template=has_own)
    return model


def balance_options(config: RunConfig, hf_config: Any) -> BalanceOptions:
    """The options of the section `balance`. `aux_loss: auto` takes the coefficient that `transformers` uses."""
    section = config.balance
    load = own_coefficient(hf_config) if section.aux_loss == "auto" else section.aux_loss
    return BalanceOptions(
        load=float(load), z=section.z_loss, bias_rate=section.bias_rate, capacity_factor=section.capacity_factor
    )


def own_coefficient(hf_config: Any) -> float:
    """Coefficient of the load-balancing loss that `transformers` adds if the config sets `output_router_logits`; else
    0. JetMoE and DBRX have other names for it."""
    if not getattr(hf_config, "output_router_logits", False):
        return 0.0
    experts = getattr(hf_config, "ffn_config", None)
    for holder, key in (
        (hf_config, "router_aux_loss_coef"),
        (hf_config, "aux_loss_coef"),
        (experts, "moe_loss_weight"),
    ):
        if getattr(holder, key, None) is not None:
            return float(getattr(holder, key))
    return 0.0


def load_source(config: RunConfig, model: PreTrainedModel, facts: ModelFacts) -> TensorSource | None:
    """The source of the first weights: a folder's safetensors, or None for random initialisation. An adapter from
    `adapter.path` is layered over it. Raises `UserError`."""
    lora, folder = config.adapter.lora, config.adapter.path
    if lora is None or not folder:
        return None if config.model.init == "random" else base_source(config, model)
    return with_peft_folder(folder, lora, facts, base_source(config, model))


def compile_pays(config: RunConfig, costs: Costs, data: PreparedData, world: World, total_steps: int) -> bool:
    """Decide `train.compile: auto`: True on a GPU; on a CPU if the run is long, none of its nodes is missing, whose
    return would end this start, and a C++ compiler is installed."""
    if config.train.compile != "auto":
        return config.train.compile
    if world.device != "cpu":
        return True
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return False
    if config.train.node_range and world.nodes < config.train.node_range[1]:
        return False
    tokens = data.train.tokens_per_row * config.train.global_batch_size * total_steps
    return costs.per_token * tokens / (CPU_FLOPS * world.size) > PAYS_AFTER_SECONDS
