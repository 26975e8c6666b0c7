"""A small decoder that is in no library, with names of its own: what somebody's new model looks like to fivefold.

Unlike Llama in everything that must not matter: module names, norms that subtract the mean, a scale and a soft cap on
the logits after the head, a learnt scale outside the base model. `register()` offers it to `transformers`; `known`
makes it a proved class of fivefold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fivefold.models import partition
from tests import parity


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    base_model_tp_plan = {  # noqa: RUF012 (as every config of transformers writes it)
        "stack.*.mixer.wq": "colwise",
        "stack.*.mixer.wk": "colwise",
        "stack.*.mixer.wv": "colwise",
        "stack.*.mixer.wo": "rowwise",
        "stack.*.gate.w1": "colwise",
        "stack.*.gate.w3": "colwise",
        "stack.*.gate.w2": "rowwise",
    }

    def __init__(
        self, vocab_size: int = 101, hidden_size: int = 32, intermediate_size: int = 53, num_hidden_layers: int = 2,
        num_attention_heads: int = 4, num_key_value_heads: int = 2, head_dim: int = 8, logit_cap: float = 1.3,
        logit_scale: float = 2.1, learnt_scale: bool = False, own_linears: bool = False,
        **rest: Any,
    ) -> None:  # fmt: skip
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        self.logit_cap, self.logit_scale, self.learnt_scale = logit_cap, logit_scale, learnt_scale
        self.own_linears = own_linears
        super().__init__(**rest)


class ToyNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return nn.functional.layer_norm(x_BTD, x_BTD.shape[-1:], self.weight, self.bias)


class ToyLinear(nn.Linear):
    """A linear with a forward of its own, as an adapter's or a quantised one's is: without it, results are others."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 1.25, self.bias)


def linear_class(config: ToyConfig) -> type[nn.Linear]:
    return ToyLinear if config.own_linears else nn.Linear


class ToyMixer(nn.Module):
    is_causal = True

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config, self.size = config, config.head_dim
        queries, keys = (n * self.size for n in (config.num_attention_heads, config.num_key_value_heads))
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        linear = linear_class(config)
        self.wq = linear(config.hidden_size, queries, bias=True)
        self.wk, self.wv = (linear(config.hidden_size, keys, bias=False) for _ in range(2))
        self.wo = linear(queries, config.hidden_size, bias=True)

    def forward(self, states: Tensor, angles: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        q, k, v = (w(states).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, _turn(q, angles), _turn(k, angles), v, attention_mask, **kwargs)
        return self.wo(out.flatten(2))


def _turn(x_BHTD: Tensor, angles_BTD: Tensor) -> Tensor:
    """Rotary positions over neighbouring features (Llama turns halves)."""
    cos, sin = (f(angles_BTD).unsqueeze(1).to(x_BHTD.dtype) for f in (torch.cos, torch.sin))
    even, odd = x_BHTD[..., ::2], x_BHTD[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class ToyGate(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        linear = linear_class(config)
        self.w1, self.w3 = (linear(config.hidden_size, config.intermediate_size, bias=False) for _ in range(2))
        self.w2 = linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(torch.tanh(self.w1(x_BTD)) * self.w3(x_BTD))


class ToyBlock(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.mixer_norm, self.gate_norm = ToyNorm(config.hidden_size), ToyNorm(config.hidden_size)
        self.mixer, self.gate = ToyMixer(config), ToyGate(config)

    def forward(self, x_BTD: Tensor, **kwargs: Any) -> Tensor:
        x_BTD = x_BTD + self.mixer(self.mixer_norm(x_BTD), **kwargs)
        return x_BTD + self.gate(self.gate_norm(x_BTD))


class ToyPreTrainedModel(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "trunk"
    _no_split_modules = ["ToyBlock"]  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True


class ToyModel(ToyPreTrainedModel):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack = nn.ModuleList(ToyBlock(config) for _ in range(config.num_hidden_layers))
        self.closing_norm = ToyNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        use_cache: bool = False, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        x_BTD = self.tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        mask = create_causal_mask(self.config, x_BTD, attention_mask, past_key_values=None, position_ids=position_ids)
        rates = 100.0 ** -torch.linspace(0, 1, self.config.head_dim // 2, dtype=torch.float64)
        angles = position_ids.unsqueeze(-1) * rates
        for block in self.stack:
            x_BTD = block(x_BTD, angles=angles, attention_mask=mask, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.closing_norm(x_BTD))


class ToyForCausalLM(ToyPreTrainedModel):
    _tied_weights_keys = {"reader.weight": "trunk.tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.trunk = ToyModel(config)
        self.reader = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.learnt_scale:
            self.temperature_norm = nn.Parameter(torch.ones(1))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.reader

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        given = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        logits = self.reader(self.trunk(**given, **kwargs).last_hidden_state) * self.config.logit_scale
        if self.config.learnt_scale:
            logits = logits * self.temperature_norm
        return CausalLMOutputWithPast(logits=torch.tanh(logits / self.config.logit_cap) * self.config.logit_cap)


def register() -> None:
    """Make the toy a model type of `transformers`, and a family of the parity tests, in this process."""
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    parity.FAMILIES["toy"] = {"model_type": "toy"}


@contextmanager
def known(listed: bool) -> Iterator[None]:
    """The toy registered; inside, it is among the proved classes where it is `listed`."""
    register()
    with patch.object(partition, "PROVED", partition.PROVED | ({"ToyForCausalLM"} if listed else set())):
        yield


def on_rank(case: parity.Case, listed: bool) -> dict[str, Any]:
    with known(listed):
        return parity.on_rank(case)


def refusal(case: parity.Case, listed: bool) -> str:
    """The error that building the case ends with."""
    with known(listed):
        return parity.refusal(case)
