"""From batches of torch tensors, as `transformers` models take them, to micro batches; checked on all ranks together.

The micro batches have the meaning that `transformers` gives to the input: labels are shifted here, padding is cut off
or ignored, and documents begin where `position_ids` restart. (`transformers` itself looks at positions if it gets no
`attention_mask` and no cache.)

Legend: B rows, T positions of an input row, L positions as computed.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from fivefold.core.errors import UserError
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel.plain import raise_any, tried
from fivefold.parallel.state import ParallelState, state_of

Batch = Mapping[str, Tensor]  # input_ids, labels [B, T]; optionally attention_mask, position_ids
Integers = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)
P = ParamSpec("P")
R = TypeVar("R")

KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
READ_MORE = "fivefold docs howto/python"


def refusal(what: str, fix: str | None = None) -> UserError:
    """An error that refers to the documentation of custom loops."""
    return UserError(what, fix=fix, more=READ_MORE)


def micro_batches(
    model: Any, batch: Batch | Sequence[Batch], *, needs_labels: bool = True,
    also: Callable[[], object] = lambda: None, has_columns: bool = False,
) -> list[MicroBatch]:  # fmt: skip
    """The micro batches of this rank's `batch`, padded with empty ones to the largest number of any data rank.

    Every rank calls this; `also` is another check that may raise. `has_columns`: further entries of the batch are
    columns for a loss of the user's own. Raises `UserError`, on every rank, if a batch cannot
    be read on one, or if ranks of one data rank got different batches.
    """
    state = state_of(model)
    plan = state.plan
    take = partial(
        micro_batch, row_multiple=plan.layout.row_multiple, vocabulary=plan.facts.vocabulary,
        logits=state.placement.shards[plan.head_weight].shape[0], needs_labels=needs_labels,
        reads_mask=_reads_mask(model), has_columns=has_columns,
    )  # fmt: skip

    def read() -> list[MicroBatch]:
        each = [batch] if isinstance(batch, Mapping) else batch
        if isinstance(each, str | Tensor) or not isinstance(each, Sequence):
            raise refusal(f"the batch is a {type(batch).__name__}", "pass a dict of tensors, or a list of such dicts")
        also()
        return [take(one) for one in each]

    found, error = tried(read)
    own = found or []
    return own + [_nothing(plan.layout.row_multiple)] * (_agree(state, own, error) - len(own))


def micro_batch(
    batch: Batch, *, row_multiple: int, vocabulary: int, logits: int | None = None, needs_labels: bool = True,
    reads_mask: bool = False, has_columns: bool = False,
) -> MicroBatch:  # fmt: skip
    """One micro batch of tensors: any T is padded up to a multiple of `row_multiple`, and padding carries no loss.
    `vocabulary`: tokens of the embedding; `logits`: those of the head, if different. `reads_mask`: the model computes
    positions from the attention mask by default.

    Raises `UserError` for tensors that are missing, of another shape or type, or out of range, or if the result would
    differ from that of `transformers`.
    """
    ids_BT = _input_ids(batch, vocabulary, has_columns=has_columns)
    rows, length = ids_BT.shape
    if not rows:
        return _nothing(row_multiple)
    targets_BT = _targets(batch, ids_BT, logits or vocabulary, needs_labels)
    columns = {key: _column(batch[key], key, (rows, length)) for key in batch if key not in KEYS}
    positions_BT = _given(batch, "position_ids", (rows, length))
    mask_BT = _given(batch, "attention_mask", (rows, length))
    if positions_BT is None:
        positions_BT = np.broadcast_to(np.arange(length), (rows, length))
    elif positions_BT.min(initial=0) < 0:
        raise refusal("position_ids are negative", "count them from 0")
    real_B = np.full(rows, length)
    if mask_BT is not None:
        real_B, first_B = _padding(mask_BT, targets_BT)
        if reads_mask and first_B.any() and batch.get("position_ids") is None:
            raise refusal(
                "rows are padded on the left, and this model counts positions by the attention_mask",
                "pass position_ids, as attention_mask.cumsum(1).sub(1).clamp(min=0), or pad on the right",
            )
        columns_BT = (np.arange(length) + first_B[:, None]) % max(length, 1)  # real tokens first
        ids_BT, targets_BT, positions_BT = (
            np.take_along_axis(integers, columns_BT, 1) for integers in (ids_BT, targets_BT, positions_BT)
        )
        columns = {key: np.take_along_axis(numbers, columns_BT, 1) for key, numbers in columns.items()}
    wide = -(-max(int(real_B.max(initial=0)), 1) // row_multiple) * row_multiple
    counting = np.arange(wide)
    is_real_BL = counting < real_B[:, None]
    positions_BL = np.where(is_real_BL, _wide(positions_BT, wide), counting - real_B[:, None])
    starts_BL = np.ones((rows, wide), bool)
    starts_BL[:, 1:] = np.diff(positions_BL, axis=1) != 1
    if mask_BT is not None and bool((starts_BL & is_real_BL)[:, 1:].any()):
        raise refusal(
            "the batch has an attention_mask and position_ids that restart, and with a mask transformers does not look "
            "at positions: documents of a row would see each other",
            "leave attention_mask out of packed rows; labels of -100 keep padding out of the loss",
        )
    targets_BL = np.where(is_real_BL, _wide(targets_BT, wide), IGNORE)
    return MicroBatch(
        input_ids=np.where(is_real_BL, _wide(ids_BT, wide), 0),
        labels=targets_BL,
        position_ids=positions_BL,
        cu_seqlens=np.append(np.flatnonzero(starts_BL), rows * wide).astype(np.int32),
        tokens=int(real_B.sum()),
        targets=int((targets_BL != IGNORE).sum()),
        row_tokens=real_B.astype(np.int64),
        columns={key: np.where(is_real_BL, _wide(column, wide), 0.0) for key, column in columns.items()},
    )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _agree(state: ParallelState, batch: Sequence[MicroBatch], error: UserError | None) -> int:
    """The largest number of micro batches of a data rank. Raises the error of any rank, and `UserError` if ranks that
    share their rows differ.

    One all-reduce of four numbers per data rank: the largest count, the largest and smallest checksum, an error.
    """
    mine = checksum(batch)
    table = torch.full((state.plan.layout.data_ranks, 4), torch.iinfo(torch.int64).min, dtype=torch.int64)
    table[state.placement.data_rank] = torch.tensor([len(batch), mine, -mine, int(error is not None)])
    table = table.to(_device())
    dist.all_reduce(table, dist.ReduceOp.MAX)
    if int(table[:, 3].max()):
        raise_any(error)
    for data_rank, (_, largest, smallest, _) in enumerate(table.tolist()):
        if largest != -smallest:
            shared = [axis for axis in ("tp", "cp", "pp") if getattr(state.plan.layout, axis) > 1]
            raise refusal(
                f"the {' and '.join(shared)} ranks of data rank {data_rank} were given different batches, and they "
                "compute parts of the same rows",
                "give all of them the same rows: read with num_replicas=model.data_ranks, rank=model.data_rank",
            )
    return int(table[:, 0].max())


def checksum(batch: Sequence[MicroBatch]) -> int:
    """A checksum of a rank's whole input, 62 bits."""
    arrays = [array for row in batch for array in (row.input_ids, row.labels, row.position_ids, row.cu_seqlens)]
    columns = [column for row in batch for column in row.columns.values()]
    text = b"".join(np.ascontiguousarray(array).tobytes() + str(array.shape).encode() for array in (*arrays, *columns))
    return xxh3_64_intdigest(text) >> 2


def _nothing(length: int) -> MicroBatch:
    """A row of padding, for a data rank without rows, or with fewer micro batches than another."""
    row = np.zeros((1, length), np.int64)
    return MicroBatch(
        row, np.full_like(row, IGNORE), np.arange(length)[None], np.array([0, length], np.int32), 0, 0,
        np.zeros(1, np.int64),
    )  # fmt: skip


# ---- the tensors of a batch ------------------------------------------------------------------------------------------


def _input_ids(batch: Batch, vocabulary: int, *, has_columns: bool) -> Integers:
    if not isinstance(batch, Mapping):
        raise refusal(f"a micro batch is a {type(batch).__name__}", "pass a dict of tensors: input_ids, labels")
    if not has_columns and (unknown := [key for key in batch if key not in KEYS]):
        raise refusal(
            f"the batch has {unknown[0]!r}",
            f"it may have {', '.join(KEYS)}; leave the rest out (with loss=function they are columns for it)",
        )
    if "input_ids" not in batch:
        raise refusal("the batch has no input_ids", "pass the tokens of this data rank: int64 [rows, tokens]")
    ids = _integers(batch["input_ids"], "input_ids")
    if ids.ndim != 2:
        hint = "add a dimension: input_ids.unsqueeze(0)" if ids.ndim == 1 else "pass int64 [rows, tokens]"
        raise refusal(f"input_ids has shape {list(ids.shape)}, not [rows, tokens]", hint)
    _check_range(ids, "input_ids", vocabulary)
    return ids


def _targets(batch: Batch, ids_BT: Integers, vocabulary: int, needs_labels: bool) -> Integers:
    """The target of each position: the label of the next one."""
    targets_BT = np.full(ids_BT.shape, IGNORE, np.int64)
    labels_BT = _given(batch, "labels", ids_BT.shape) if needs_labels or batch.get("labels") is not None else None
    if labels_BT is None:
        if needs_labels:
            raise refusal(
                "the batch has no labels",
                "labels=input_ids.clone(), with -100 for no target (padding, prompts); they are shifted here",
            )
        return targets_BT
    _check_range(labels_BT[labels_BT != IGNORE], "labels", vocabulary)
    targets_BT[:, :-1] = labels_BT[:, 1:]
    return targets_BT


def _column(tensor: Any, key: str, shape: tuple[int, int]) -> NDArray[np.float64]:
    """The number of a column at each target, fp64 [B, T], from one at each label [B, T] or for each row [B]."""
    if not isinstance(tensor, Tensor) or tensor.is_complex():
        raise refusal(f"{key} is no tensor of numbers", f"pass a tensor for the loss: {key} [rows, tokens] or [rows]")
    if tuple(tensor.shape) not in (shape, shape[:1]):
        raise refusal(
            f"{key} has shape {list(tensor.shape)}, input_ids {list(shape)}",
            f"pass a number for each label, {list(shape)}, or for each row, {list(shape[:1])}",
        )
    given = tensor.detach().cpu().double().numpy()
    if given.ndim == 1:
        return np.repeat(given[:, None], shape[1], 1)
    return np.pad(given[:, 1:], ((0, 0), (0, 1)))


def _padding(mask_BT: Integers, targets_BT: Integers) -> tuple[Integers, Integers]:
    """The number of real tokens in each row of a mask, and their start."""
    if bool(((mask_BT != 0) & (mask_BT != 1)).any()):
        raise refusal(
            "attention_mask has other values than 0 and 1", "mark packed documents by position_ids that restart"
        )
    real_B, first_B = mask_BT.sum(1), mask_BT.argmax(1)
    columns = np.arange(mask_BT.shape[1])
    is_one_run = mask_BT == ((columns >= first_B[:, None]) & (columns < (first_B + real_B)[:, None]))
    if not bool(is_one_run.all()):
        row = int(np.flatnonzero(~is_one_run.all(1))[0])
        raise refusal(
            f"attention_mask hides tokens in the middle of row {row}", "padding stands at the beginning or end of a row"
        )
    wrong = np.argwhere((mask_BT == 0) & (targets_BT != IGNORE))
    if len(wrong):
        row, at = wrong[0].tolist()
        raise refusal(
            f"the label of row {row} at position {at + 1} would be predicted from padding",
            "set labels to -100 on padding, and on the first token after it where rows are padded on the left",
        )
    return real_B, first_B


def _given(batch: Batch, key: str, shape: tuple[int, ...]) -> Integers | None:
    """A tensor of the batch in the shape of its input_ids; None if it is missing."""
    if batch.get(key) is None:
        return None
    values = _integers(batch[key], key, any_type=key == "attention_mask")
    if key == "position_ids" and values.ndim <= 2 and values.shape[-1:] == shape[1:] and values.size == shape[1]:
        return np.broadcast_to(values.reshape(1, -1), shape)
    if values.shape != shape:
        raise refusal(f"{key} has shape {list(values.shape)}, input_ids {list(shape)}", f"pass {key} in that shape")
    return values


def _integers(tensor: Any, key: str, *, any_type: bool = False) -> Integers:
    if not isinstance(tensor, Tensor):
        raise refusal(f"{key} is a {type(tensor).__name__}", f"pass a tensor: torch.tensor({key})")
    if not any_type and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise refusal(f"{key} is {tensor.dtype}", f"pass integers: {key}.long()")
    values = tensor.detach().cpu()
    whole = values.long()
    if any_type and not bool((whole == values).all()):
        raise refusal(f"{key} has other values than 0 and 1", "pass 1 for tokens and 0 for padding")
    return whole.numpy()


def _check_range(values: Integers, key: str, vocabulary: int) -> None:
    if values.size and not 0 <= values.min() <= values.max() < vocabulary:
        wrong = int(values.min() if values.min() < 0 else values.max())
        hint = "a label without a target is -100" if key == "labels" else "is it the model's own tokenizer?"
        raise refusal(f"{key} has {wrong}, and the model's vocabulary is {vocabulary}", hint)


def _reads_mask(model: nn.Module) -> bool:
    """True if an embedding of `model` reads the mask, such as OPT's positional embedding: there, the position of a
    token after left padding is not its place in the row, unlike in other models."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return any("attention_mask" in inspect.signature(type(embedding).forward).parameters for embedding in embeddings)


def _wide(values_BT: NDArray[Number], wide: int) -> NDArray[Number]:
    """Cut or zero-pad to [B, wide]."""
    kept = values_BT[:, :wide]
    return np.pad(kept, ((0, 0), (0, wide - kept.shape[1])))


def leaves_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run without gradients in place of inference mode, in which FSDP would make what cannot be trained."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def check_grad_enabled() -> None:
    if not torch.is_grad_enabled():
        raise refusal(
            "gradients are off here: torch.no_grad()",
            fix="train outside of it; ff.evaluate(model, batches) gives a loss alone",
        )


def some(batch: list[MicroBatch]) -> list[MicroBatch]:
    """Return `batch`. Raises `UserError` if it has no micro batch."""
    if not batch:
        raise refusal("no rank has a micro batch", fix="pass a dict of tensors, or a list of some")
    return batch
