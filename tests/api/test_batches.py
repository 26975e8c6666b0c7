"""What becomes of a batch of torch tensors, number by number."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import fivefold as ff
from fivefold.data.batch import MicroBatch
from fivefold.own_loop.batches import checksum, micro_batch
from tests.pool import run_ranks

NONE = -100
IDS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])


def read(batch: dict[str, Any], row_multiple: int = 1) -> MicroBatch:
    return micro_batch(batch, row_multiple=row_multiple, vocabulary=100)


def test_labels_are_shifted_and_rows_are_filled_up_to_the_multiple() -> None:
    labels = IDS.clone()
    labels[0, 2] = NONE
    found = read({"input_ids": IDS, "labels": labels}, row_multiple=4)
    assert found.input_ids.tolist() == [[11, 12, 13, 14, 15, 0, 0, 0], [21, 22, 23, 24, 25, 0, 0, 0]]
    assert found.labels.tolist() == [[12, NONE, 14, 15, *[NONE] * 4], [22, 23, 24, 25, *[NONE] * 4]]
    assert found.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    assert found.cu_seqlens.tolist() == [0, 5, 8, 13, 16]
    assert (found.tokens, found.targets) == (10, 7)
    assert found.row_tokens is not None and found.row_tokens.tolist() == [5, 5]


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
def test_padding_on_either_side_takes_no_part_and_positions_stay(kind: torch.dtype) -> None:
    """A token on the right of padding keeps the position that `transformers` gives it, which learned ones show."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    labels = IDS.masked_fill(mask == 0, NONE)
    labels[1, 1] = NONE
    found = read({"input_ids": IDS, "labels": labels, "attention_mask": mask.to(kind)})
    assert found.input_ids.tolist() == [[11, 12, 13, 0], [22, 23, 24, 25]]
    assert found.labels.tolist() == [[12, 13, NONE, NONE], [23, 24, 25, NONE]]
    assert found.position_ids.tolist() == [[0, 1, 2, 0], [1, 2, 3, 4]]
    assert found.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert (found.tokens, found.targets) == (7, 5)
    assert found.row_tokens is not None and found.row_tokens.tolist() == [3, 4]


def test_columns_are_those_of_the_label_and_padding_has_none() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, NONE)}
    batch["labels"][1, 1] = NONE
    columns = {"each": IDS / 10, "row": torch.tensor([7, 8])}
    found = micro_batch(batch | columns, row_multiple=1, vocabulary=100, has_columns=True)
    assert found.columns["row"].tolist() == [[7, 7, 7, 0], [8, 8, 8, 8]]
    trained = found.labels != NONE
    assert np.allclose(found.columns["each"][trained], found.labels[trained] / 10)


def test_a_document_begins_wherever_positions_do_not_go_on_by_one() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2], [3, 4, 7, 8, 8]])
    found = read({"input_ids": IDS, "labels": IDS, "position_ids": positions})
    assert found.position_ids.tolist() == positions.tolist()
    assert found.cu_seqlens.tolist() == [0, 2, 5, 7, 9, 10]
    of_all_rows = read({"input_ids": IDS, "labels": IDS, "position_ids": positions[0]})
    assert of_all_rows.cu_seqlens.tolist() == [0, 2, 5, 7, 10]


def test_no_rows_are_a_row_of_padding() -> None:
    found = read({"input_ids": IDS[:0], "labels": IDS[:0]}, row_multiple=4)
    assert found.input_ids.shape == (1, 4) and (found.labels == NONE).all()
    assert (found.tokens, found.targets) == (0, 0)
    assert found.row_tokens is not None and found.row_tokens.tolist() == [0]


def test_whatever_differs_between_ranks_is_in_the_checksum() -> None:
    """Ranks that share their rows compare it: ids, labels, positions, documents, shape, and how many there are."""
    positions = torch.arange(5).expand(2, -1)
    base = {"input_ids": IDS, "labels": IDS, "position_ids": positions}
    others = [
        [base | {"input_ids": IDS + 1}],
        [base | {"labels": IDS.masked_fill(IDS == 13, NONE)}],
        [base | {"position_ids": positions + 1}],
        [base | {"position_ids": torch.tensor([0, 1, 0, 1, 2])}],
        [{key: value.reshape(1, 10) for key, value in base.items()}],
        [base, base],
        [],
    ]
    sums = [checksum([read(each) for each in batch]) for batch in [[base], *others]]
    assert len(set(sums)) == len(sums)
    assert sums[0] == checksum([read({key: value.clone() for key, value in base.items()})])
    assert all(0 <= each < np.iinfo(np.int64).max for each in sums), "its negative has to fit as well"
    weights = [{"weight": torch.full((2,), number)} for number in (0.5, 0.25)]
    of_columns = [
        checksum([micro_batch(base | each, row_multiple=1, vocabulary=100, has_columns=True)]) for each in weights
    ]
    assert len({sums[0], *of_columns}) == 3


@pytest.mark.full
def test_padding_on_the_left_of_a_model_that_counts_by_the_mask_needs_positions() -> None:
    """OPT: by place in the row the loss was another one than that of `transformers`, without a word."""
    assert run_ranks(1, counted_by_the_mask) == [True]


def counted_by_the_mask() -> bool:
    options = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 53}
    config = OPTConfig(**options, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0)
    torch.manual_seed(3)
    model: Any = OPTForCausalLM(config).double()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    labels = IDS.masked_fill(mask == 0, NONE)
    labels[0, 2] = NONE
    batch = {"input_ids": IDS, "labels": labels, "attention_mask": mask}
    expected = float(model(**batch).loss)
    model = ff.parallelize(model, "single")
    with pytest.raises(ff.UserError, match="counts positions by the attention_mask"):
        model.backward(batch)
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    assert float(model.backward(batch | {"position_ids": positions})) == pytest.approx(expected, rel=1e-6)
    right = batch | {"attention_mask": mask.flip(1), "labels": labels.flip(1)}
    right["labels"][0, 2:] = NONE
    assert torch.isfinite(model.backward(right))
    return True
