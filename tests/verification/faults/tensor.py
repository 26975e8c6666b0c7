"""Bugs of tensor and sequence parallelism."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.ops import linear as seam
from fivefold.ops.linear import Multiply
from fivefold.parallel import lower, shard_rules
from fivefold.parallel.sharding import Block, split_even
from fivefold.parallel.tensor import mappings
from fivefold.parallel.tensor import runtime as tensor
from fivefold.parallel.tensor.mappings import gather, gather_blocks, identity, mapping, sum_all
from fivefold.parallel.tensor.runtime import TensorParallel
from tests.verification.faults.fault import Model, fault

# Intermediate sizes that can be cut in the wrong places and still be run.
PHI3 = Model("phi3", changes=(("intermediate_size", 56),))


def _without_sums(lost: Callable[[str, str], bool]) -> Any:
    """Gradient sums are lost where `lost(name, axis)`."""
    plain = lower.gradient_sums

    def sums(*args: Any, **options: Any) -> Mapping[str, str]:
        return {name: axis for name, axis in plain(*args, **options).items() if not lost(name, axis)}

    return patch.object(lower, "gradient_sums", sums)


# ---- gradients that ranks hold in part ------------------------------------------------------------------------------


@fault(
    "no partial gradient is summed over tp: norms and row biases see their rank's tokens only",
    known="bigscience Megatron-DeepSpeed #274, TransformerEngine #441",
    layout="tp2",
    expects=[("gradient, reduced", r"norm|bias")],
)
def partial_gradients_not_summed() -> Any:
    return patch.object(tensor, "sum_partial_gradients", lambda *_: None)


@fault(
    "gradients of norm weights not summed over tp under sequence parallelism",
    known="TransformerEngine #441",
    layout="tp2",
    expects=[("gradient, reduced", r"norm")],
)
def norm_gradients_not_summed() -> Any:
    return _without_sums(lambda name, _: "norm" in name)


@fault(
    "gradients of row-parallel biases not summed over tp under sequence parallelism",
    known="bigscience Megatron-DeepSpeed #307, torchtitan #4332",
    layout="tp2",
    expects=[("gradient, reduced", r"(o_proj|down_proj)\.bias")],
)
def row_bias_gradients_not_summed() -> Any:
    return _without_sums(lambda name, _: name.endswith("bias"))


@fault(
    "gradients of the norms over each head (Qwen3) not summed over tp",
    known="TransformerEngine #441, for norms that see a rank's heads",
    layout="tp2",
    model=Model("qwen3"),
    expects=[("gradient, reduced", r"[qk]_norm")],
)
def head_norm_gradients_not_summed() -> Any:
    return _without_sums(lambda name, _: "q_norm" in name or "k_norm" in name)


@fault(
    "gradients of key/value heads that several ranks hold not summed",
    known="bigcode Megatron-LM #37",
    layout="tp2",
    model=Model(kv_heads=1),
    expects=[("gradient, reduced", r"[kv]_proj")],
)
def key_value_copies_not_summed() -> Any:
    return _without_sums(lambda _, axis: axis == "tp_kv")


@fault(
    "gradients of latent projections (DeepSeek-V3), of which a rank sees what its own heads give, not summed over tp",
    known="TransformerEngine #441, for projections that are whole on every rank",
    layout="tp2",
    model=Model("deepseek_v3"),
    expects=[("gradient, reduced", r"(q_a|kv_a)_proj")],
)
def latent_gradients_not_summed() -> Any:
    return _without_sums(lambda name, _: "_a_proj" in name)


@fault(
    "gradients of the norms on latents not summed over tp, without sequence parallelism",
    known="TransformerEngine #441, for norms whose input is whole and whose gradient is not",
    layout="tp2+nosp",
    model=Model("deepseek_v3"),
    expects=[("gradient, reduced", r"_a_layernorm")],
)
def latent_norm_gradients_not_summed() -> Any:
    return _without_sums(lambda name, _: "_a_layernorm" in name)


# ---- collectives with gradients -------------------------------------------------------------------------------------


@fault(
    "input gradient of a column-parallel layer scattered without the sum",
    known="Megatron's f without its all-reduce, arXiv:1909.08053",
    layout="tp2",
    expects=[("gradient of output", r"^model\.norm")],  # backward comes first to what the head reads
)
def input_gradient_of_a_column_not_reduced() -> Any:
    def cut(grad: Tensor, group: Any) -> Tensor:
        return grad.chunk(group.size(), 1)[group.rank()].contiguous()

    return patch.object(tensor, "gather_from_sequence", mapping(gather, cut))


@fault(
    "input gradient of a column-parallel layer not reduced, without sequence parallelism",
    known="Megatron's f without its all-reduce, arXiv:1909.08053",
    layout="tp2+nosp",
    expects=[("gradient of output", r"^model\.norm")],
)
def copied_input_gradient_not_reduced() -> Any:
    return patch.object(tensor, "copy_to_tensor_parallel", mapping(identity, identity))


@fault(
    "gradient of an all-reduce all-reduced again: twice too large below every row-parallel layer",
    known="torch.distributed.nn.functional.all_reduce, whose backward is an all-reduce, in place of Megatron's g",
    layout="tp2+nosp",
    expects=[("gradient of output", r"down_proj input.* 2 times")],
)
def gradient_of_a_sum_summed_again() -> Any:
    return patch.object(tensor, "reduce_from_tensor_parallel", mapping(sum_all, sum_all))


@fault(
    "the gathered input of a norm across all features keeps only its own rank's gradient",
    known="a gather whose backward only cuts",
    layout="tp2",
    model=Model("olmo2"),
    expects=[("gradient of output", r"[qk]_proj")],
)
def gathered_features_keep_their_own_gradient() -> Any:
    def cut(grad: Tensor, group: Any, blocks: Any) -> Tensor:
        return grad[..., mappings.feature_indices(blocks[group.rank()])]

    return patch.object(tensor, "gather_features", mapping(gather_blocks, cut))


@fault(
    "each copy of a key/value head gets the whole gradient of a norm across all heads, and the copies are summed",
    known="a gather whose backward does not know of copies",
    layout="tp4",
    model=Model("olmo2"),
    expects=[("gradient of output", r"self_attn\.k_proj: 2 times")],
)
def gathered_copies_get_the_whole_gradient() -> Any:
    def whole(grad: Tensor, group: Any, blocks: Any) -> Tensor:
        return sum_all(grad, group)[..., mappings.feature_indices(blocks[group.rank()])]

    return patch.object(tensor, "gather_features", mapping(gather_blocks, whole))


# ---- what ranks compute ---------------------------------------------------------------------------------------------


@fault(
    "row-parallel bias added on every rank",
    known="text-generation-inference #1036, Paddle #35186",
    layout="tp2",
    expects=[("output", r"o_proj")],
)
def bias_of_a_row_added_on_every_rank() -> Any:
    def biased(linear: Any, multiply: Multiply, reduce: Multiply) -> Multiply:
        return lambda x_BTF: reduce(multiply(x_BTF) + (0 if linear.bias is None else linear.bias))

    return patch.object(seam, "_biased", biased)


@fault(
    "partial sums of a row-parallel layer averaged over tp",
    known="an average in place of a sum",
    layout="tp2",
    expects=[("output", r"o_proj")],
)
def row_outputs_averaged() -> Any:
    plain = seam._biased

    def averaged(module: Any, multiply: Multiply, reduce: Multiply) -> Multiply:
        return plain(module, multiply, lambda out: reduce(out) / 2)

    return patch.object(seam, "_biased", averaged)


@fault(
    "ids of other ranks' vocabulary rows looked up as row 0 and not masked",
    known="Megatron's vocabulary-parallel embedding without its mask",
    layout="tp2",
    expects=[("output", r"embed_tokens")],
)
def embedding_of_other_ranks_not_masked() -> Any:
    def lookup(embedding: Any, own: Block, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
        start, stop = own
        plain = embedding.forward
        return lambda ids_BT: fold.leave(plain(torch.where((ids_BT >= start) & (ids_BT < stop), ids_BT - start, 0)))

    return patch.object(tensor, "_vocabulary_lookup", lookup)


@fault(
    "the embedding's own scale (Gemma) is lost in the split lookup",
    known="a lookup of one's own in place of the model's",
    layout="tp2",
    model=Model("gemma2"),
    expects=[("output", r"embed_tokens")],
)
def embedding_scale_lost() -> Any:
    def lookup(embedding: Any, own: Block, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
        start, stop = own

        def forward(ids_BT: Tensor) -> Tensor:
            mine = (ids_BT >= start) & (ids_BT < stop)
            rows = F.embedding(torch.where(mine, ids_BT - start, 0), embedding.weight)
            return fold.leave(rows.masked_fill(~mine.unsqueeze(-1), 0.0))

        return forward

    return patch.object(tensor, "_vocabulary_lookup", lookup)


@fault(
    "positions start at 0 in every rank's part of the sequence",
    known="positions counted off a rank's own tokens",
    layout="tp2",
    expects=[("output", r"rotary")],
)
def positions_restart_per_sequence_shard() -> Any:
    def with_positions(fold: TensorParallel) -> Callable[..., tuple[Any, Any]]:
        def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if fold.sequence_parallel:
                own = kwargs["position_ids"].shape[1] // fold.size
                kwargs["position_ids"] = torch.arange(own).repeat(fold.size).expand_as(kwargs["position_ids"])
            return args, kwargs

        return hook

    return patch.object(tensor, "_with_positions", with_positions)


# ---- who holds what -------------------------------------------------------------------------------------------------


@fault(
    "ranks hold the key/value heads of their neighbour: query heads attend to the wrong ones",
    known="a head map that is not the loader's",
    layout="tp2",
    expects=[("output", r"self_attn(\.o_proj input)?( |:|$)")],
)
def wrong_key_value_heads() -> Any:
    plain = shard_rules._blocks

    def blocks(groups: Any, rank: int, tp: int) -> Iterator[Any]:
        only_kv = {part.owner for part in groups} == {"kv"}
        return plain(groups, (rank + 1) % tp if only_kv else rank, tp)

    return patch.object(shard_rules, "_blocks", blocks)


def _in_halves(owners: set[str]) -> Any:
    """Projections of several parts, of these owners, are cut once in the middle."""
    plain = shard_rules.feature_blocks

    def feature_blocks(groups: Any, tp: int) -> Any:
        if {part.owner for part in groups} == owners and len(groups) > 1:
            return tuple((block,) for block in split_even(max(part.stop for part in groups), tp))
        return plain(groups, tp)

    return patch.object(shard_rules, "feature_blocks", feature_blocks)


@fault(
    "gate and up in one projection (Phi-3) cut once in the middle: a rank has the gate, another the up",
    known="tt-metal #52818 (review)",
    layout="tp2",
    model=PHI3,
    expects=[("output", r"layers\.0\.mlp\.")],
)
def gate_and_up_cut_in_the_middle() -> Any:
    return _in_halves({"even"})


@fault(
    "query, key and value in one projection (Phi-3) cut once in the middle",
    known="ColossalAI #817",
    layout="tp2",
    model=PHI3,
    expects=[("output", r"layers\.0\.self_attn")],
)
def query_key_value_cut_in_the_middle() -> Any:
    return _in_halves({"query", "kv"})


@fault(
    "a norm across all query features (OLMo 2) computed over a rank's own",
    known="norms over all heads, under tensor parallelism",
    layout="tp2",
    model=Model("olmo2"),
    expects=[("output", r"[qk]_norm")],
)
def norm_over_own_features() -> Any:
    def over_own(plain: Any, blocks: Any, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
        norm, mine = plain.__self__, tensor.feature_indices(blocks[fold.rank])

        def forward(x_BTF: Tensor) -> Tensor:
            scale = torch.rsqrt(x_BTF.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            return x_BTF * scale * norm.weight[mine]

        return forward

    return patch.object(tensor, "_over_all_features", over_own)
