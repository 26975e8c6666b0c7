"""A Llama in plain code: what one writes who wants speed on one machine and no library (as nanoGPT and nanochat are for
GPT). The fused kernels of PyTorch where there is one, no masks, no caches, no configuration. Nothing of fivefold is
used.

Legend: B rows, T tokens a row, H heads, D size of a head, E hidden size, F features, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, hidden: int, features: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.first, self.second = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * features, bias=False)
        self.down = nn.Linear(features, hidden, bias=False)

    def forward(self, x_BTE: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        size = x_BTE.shape[-1]
        qkv = self.qkv(F.rms_norm(x_BTE, (size,), self.first, self.eps))
        q, k, v = qkv.unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)  # [B, H, T, D]
        q, k = (x * cos_TD + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin_TD
                for x in (q, k))  # fmt: skip
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTE = x_BTE + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x_BTE, (size,), self.second, self.eps)).chunk(2, -1)
        return x_BTE + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Tied, with as many key/value heads as query heads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.blocks = nn.ModuleList(
            Block(size, config.intermediate_size, config.num_attention_heads, eps)
            for _ in range(config.num_hidden_layers)
        )
        self.norm, self.eps = nn.Parameter(torch.ones(size)), eps
        width = size // config.num_attention_heads
        inverse = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.int64) / width)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), inverse)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """The cross entropy, summed."""
        x, length = self.embedding(ids_BT), ids_BT.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits = F.linear(F.rms_norm(x, (x.shape[-1],), self.norm, self.eps), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels_BT.flatten(), reduction="sum")

    @torch.no_grad()
    def take(self, model: Any) -> None:
        """The weights of a `transformers` Llama."""
        self.embedding.weight.copy_(model.model.embed_tokens.weight)
        self.norm.copy_(model.model.norm.weight)
        for block, layer in zip(self.blocks, model.model.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            block.qkv.weight.copy_(
                torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
            )
            block.out.weight.copy_(attention.o_proj.weight)
            block.gate_up.weight.copy_(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
            block.down.weight.copy_(mlp.down_proj.weight)
            block.first.copy_(layer.input_layernorm.weight)
            block.second.copy_(layer.post_attention_layernorm.weight)


def train(
    model: Llama, batches: Iterable[list[Any]], learning_rates: Iterable[float], *, bf16: bool,
    betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float,
) -> Iterator[float]:  # fmt: skip
    """As `plain_loop.train`, of rows that are one document each."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
    for batch, learning_rate in zip(batches, learning_rates, strict=False):
        (part,) = batch
        targets = int((part.labels != -100).sum())
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(torch.from_numpy(part.input_ids), torch.from_numpy(part.labels)) / targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
