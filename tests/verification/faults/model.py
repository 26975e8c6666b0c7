"""Bugs of what a model computes: positions, documents, attention, weights on their way in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from fivefold.models import attention, kernels, packed
from fivefold.models.attention import Mask
from fivefold.models.sources import SafetensorsFolder
from fivefold.parallel import apply
from fivefold.parallel.fsdp import runtime as data
from fivefold.verification import proof_case
from tests.verification.faults.fault import Model, fault

ATTENDED = [("output", r"layers\.0\.self_attn(\.o_proj input)?( |:|$)")]  # the first thing that attention made


def _attention(change: Callable[[dict[str, Any]], None]) -> Any:
    """Attention is called with other arguments."""
    plain = attention.attention_forward

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        given = {"query": query, "key": key, "value": value, "attention_mask": mask, **options}
        change(given)
        return plain(module, **given)

    return patch.object(attention, "attention_forward", forward)


# ---- positions and documents ----------------------------------------------------------------------------------------


@fault(
    "positions count on through a row of several documents",
    known="nanoVLM #201, LlamaFactory #7318",
    layout="shard2",
    model=Model("gpt2"),  # learned positions: rotary ones are relative, and there the bug changes no loss
    expects=[("output", r"wpe")],
)
def positions_run_through_documents() -> Any:
    plain = proof_case.assemble

    def assemble(rows: Any, **options: Any) -> Any:
        batch = plain(rows, **options)
        batch.position_ids[:] = range(batch.position_ids.shape[1])
        return batch

    return patch.object(proof_case, "assemble", assemble)


@fault(
    "documents of a row see each other",
    known="axolotl #131, #1375",
    layout="shard2",
    expects=ATTENDED,
)
def document_mask_dropped() -> Any:
    return _attention(lambda given: given.update(cu_seqlens=None))


@fault(
    "recompute runs with the documents of another micro batch",
    known="recompute that reads what has changed since",
    layout="shard2+full",
    expects=[("gradient of output", r"layers\.1\.")],
)
def recompute_without_documents() -> Any:
    plain = packed.packed_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *rest: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # inside backward
            is_inside = cu_seqlens[:-1] % query.shape[2] != 0
            cu_seqlens = torch.cat([cu_seqlens[:-1] + is_inside * (cu_seqlens.diff() > 1), cu_seqlens[-1:]]).int()
        return plain(query, key, value, cu_seqlens, *rest)

    return patch.object(attention, "packed_attention", attend)


@fault(
    "cosines and sines of positions rounded to bf16",
    known="gpt-neox #1003, transformers #25681",
    layout="shard2",
    expects=[("output", r"rotary")],
)
def rotary_tables_rounded() -> Any:
    plain = modeling_llama.LlamaRotaryEmbedding.forward

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(each.bfloat16().type(x.dtype) for each in plain(self, x, *args, **options))

    return patch.object(modeling_llama.LlamaRotaryEmbedding, "forward", forward)


@fault(
    "the scaling of rotary frequencies (Llama 3) is ignored",
    known="a rope_scaling that is not read",
    layout="shard2",
    expects=[("output", r"rotary")],
)
def rotary_scaling_ignored() -> Any:
    plain = apply.buffer_values

    def buffer_values(model: Any) -> Any:
        unscaled, _ = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(model.config)
        found = plain(model)
        return {name: unscaled if name.endswith("inv_freq") else values for name, values in found.items()}

    return patch.object(apply, "buffer_values", buffer_values)


# ---- attention -------------------------------------------------------------------------------------------------------


@fault(
    "key/value heads repeated in turns: query head h attends with h mod their number",
    known="repeat in place of repeat_interleave",
    layout="shard2",
    expects=ATTENDED,
)
def key_value_heads_in_turns() -> Any:
    def repeat(given: dict[str, Any]) -> None:
        times = given["query"].shape[1] // given["key"].shape[1]
        given.update({name: given[name].repeat(1, times, 1, 1) for name in ("key", "value")})

    return _attention(repeat)


@fault(
    "a sliding window sees one token too many",
    known="transformers #39408, mlx-lm #390",
    layout="shard2",
    model=Model("mistral"),
    expects=ATTENDED,
)
def window_off_by_one() -> Any:
    def widen(given: dict[str, Any]) -> None:
        mask: Mask = given["attention_mask"]
        given["attention_mask"] = replace(mask, window=mask.window and mask.window + 1)

    return _attention(widen)


@fault(
    "layers that slide attend to everything",
    known="unsloth #8253",
    layout="shard2",
    model=Model("gemma2"),
    expects=ATTENDED,
)
def window_lost() -> Any:
    return _attention(lambda given: given.update(attention_mask=Mask()))


@fault(
    "the soft cap of attention scores (Gemma 2) is lost",
    known="transformers #32309",
    layout="shard2",
    model=Model("gemma2"),
    expects=ATTENDED,
)
def soft_cap_of_scores_lost() -> Any:
    return _attention(lambda given: given.update(softcap=None))


@fault(
    "scores are scaled by the head size, whatever the config says (Gemma 2)",
    known="a port without query_pre_attn_scalar",
    layout="shard2",
    model=Model("gemma2"),
    expects=ATTENDED,
)
def scale_of_scores_ignored() -> Any:
    return _attention(lambda given: given.update(scaling=None))


@fault(
    "backward of soft-capped scores leaves out the derivative of the cap",
    known="flash-attention #1065",
    layout="shard2",
    model=Model("gemma2"),
    expects=[("gradient of output", r"layers\.1\.self_attn\.[qk]_proj")],
)
def derivative_of_the_cap_left_out() -> Any:
    plain = kernels.blockwise_backward

    def backward(*args: Any, **options: Any) -> Any:
        exact = torch.Tensor.square_
        with patch.object(torch.Tensor, "square_", lambda self: exact(self).zero_()):
            return plain(*args, **options)

    return patch.object(kernels, "blockwise_backward", backward)


@fault(
    "gradients at the padding of a batch of documents reach their keys and values",
    known="padding that is masked on the way in alone",
    layout="tp2",
    expects=[("gradient of output", r"layers\.1\.self_attn\.[kv]_proj")],
)
def padding_of_documents_has_gradients() -> Any:
    plain = packed.Group.take
    return patch.object(packed.Group, "take", lambda self, tokens, **_: plain(self, tokens))


@fault(
    "norms multiply by w where the model says 1 + w (Gemma)",
    known="Gemma's norms read as Llama's",
    layout="shard2",
    model=Model("gemma2"),
    expects=[("output", r"layers\.0\.input_layernorm")],
)
def norm_without_its_one() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (self._norm(x.double()) * self.weight.double()).type_as(x)

    return patch.object(modeling_gemma2.Gemma2RMSNorm, "forward", forward)


# ---- weights on their way in ----------------------------------------------------------------------------------------


def _read(instead: Callable[[Callable[[Any], Tensor], Any], Tensor], suffix: str) -> Any:
    """`instead(read, region)` gives the parameters whose names end in `suffix`."""
    plain = SafetensorsFolder.read

    def read(self: Any, name: str, region: Any) -> Tensor:
        if not name.endswith(suffix):
            return plain(self, name, region)
        return instead(lambda where: plain(self, name, where), region)

    return patch.object(SafetensorsFolder, "read", read)


@fault(
    "query projection permuted between rotary conventions (halves, pairs) on import",
    known="the two layouts of Llama's query and key",
    layout="shard2",
    expects=[("weight", r"q_proj\.weight")],
)
def rotary_permutation_on_import() -> Any:
    def permuted(read: Any, region: Any) -> Tensor:
        columns = slice(0, 32)
        whole = read((slice(0, 32), columns))  # 4 heads of 8
        return whole.view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)[region]

    return _read(permuted, "q_proj.weight")


@fault(
    "a square projection loaded transposed",
    known="Conv1D and Linear weights mixed up",
    layout="shard2",
    expects=[("weight", r"o_proj\.weight")],
)
def loaded_transposed() -> Any:
    return _read(lambda read, region: read(region[::-1]).T, "o_proj.weight")


@fault(
    "every tensor parallel rank loads the rows of rank 0",
    known="a loader without the rank's offset",
    layout="tp2",
    expects=[("weight", r"up_proj\.weight.*\(tp rank 1\)")],
)
def rows_of_the_first_rank() -> Any:
    def first(read: Any, region: Any) -> Tensor:
        rows, columns = region
        return read((slice(0, rows.stop - rows.start), columns))

    return _read(first, "up_proj.weight")


@fault(
    "weights pass through bf16 on their way in",
    known="weights read in the model's type, then made fp32",
    layout="shard2",
    expects=[("weight", r"embed_tokens")],
)
def weights_rounded_on_import() -> Any:
    return _read(lambda read, region: read(region).bfloat16().float(), "")


@fault(
    "parameters are gathered in bf16 though the layout says fp64",
    known="mixed precision that nobody asked for",
    layout="shard2",
    expects=[("output", r"embed_tokens")],
)
def computed_in_another_type() -> Any:
    plain = data.MixedPrecisionPolicy
    return patch.object(
        data, "MixedPrecisionPolicy", lambda **options: plain(**options | {"param_dtype": torch.bfloat16})
    )
