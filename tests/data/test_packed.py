"""Rows that another engine packed: their documents are those that its columns bound, in any format of file."""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import Subtests

from fivefold.data import IGNORE, PreparedData, prepare
from fivefold.data.token_ids import BOUNDS, documents_in
from tests.data.helpers import config_for, segments, whole
from tests.data.test_formats import refusal
from tests.data.test_token_files import documents, line_of, read

ROW = [1, 2, 3, 11, 12, 21, 22, 23]
APART = [([1, 2, 3], [2, 3]), ([11, 12], [12]), ([21, 22, 23], [22, 23])]
# Each says that a row of 8 tokens has documents of 3, 2 and 3.
SAID: Mapping[str, list[int]] = {
    "seq_lengths": [3, 2, 3], "sequence_lengths": [3, 0, 2, 3], "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
    "attention_mask": [1, 1, 1, 2, 2, 3, 3, 3], "cu_seqlens": [0, 3, 5, 8], "cu_seq_lens_q": [0, 3, 5, 8, 8],
    "seq_start_id": [0, 3, 5], "segment_ids": [1, 1, 1, 2, 2, 3, 3, 3], "seq_idx": [0, 0, 0, 1, 1, 2, 2, 2],
    "document_ids": [7, 7, 7, 4, 4, 9, 9, 9], "sequence_ids": [0, 0, 0, 1, 1, 2, 2, 2],
}  # fmt: skip


def rows(folder: Path, **columns: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": ROW, **columns}) + "\n")
    return path


@pytest.mark.parametrize("name", SAID)
def test_a_column_bounds_the_documents_of_a_row(tmp_path: Path, name: str) -> None:
    data = read(tmp_path, rows(tmp_path, **{name: SAID[name]}))
    assert documents(data) == APART
    assert "3 documents of packed rows, each by itself: no EOS added" in line_of(data)
    labels = [IGNORE, 2, IGNORE, 11, 12, 21, IGNORE, 23]
    data = read(tmp_path, rows(tmp_path, labels=labels, **{name: SAID[name]}))
    assert documents(data) == [([1, 2, 3], [2]), ([11, 12], [12]), ([21, 22, 23], [23])]
    data = read(tmp_path, rows(tmp_path, completion_mask=[0, 1, 0, 1, 1, 1, 0, 1], **{name: SAID[name]}))
    assert documents(data) == [([1, 2, 3], [2]), ([11, 12], [12]), ([21, 22, 23], [23])]


def test_every_name_of_a_column_bounds_documents() -> None:
    """A name that is not known is left out without an error: attention would cross the documents."""
    of_kind = {BOUNDS[name]: np.array(values) for name, values in SAID.items()}
    known = """attention_mask position_ids positions sequence_ids sequence_id segment_ids document_ids doc_ids seq_idx
        seq_lengths sequence_lengths seq_lens seqlens document_lengths cu_seqlens cu_seqlens_q cu_seqlens_k cu_seq_lens
        cu_seq_lens_q cu_seq_lens_k cumulative_len seq_start_id"""
    for name in known.split():
        places, is_packed = documents_in({name: of_kind[BOUNDS[name]]}, len(ROW), "here")
        assert is_packed and [(place.start, place.stop) for _, place in places] == [(0, 3), (3, 5), (5, 8)], name
    assert BOUNDS.keys() == {*known.split()}


def test_columns_that_agree_are_all_used(tmp_path: Path) -> None:
    assert documents(read(tmp_path, rows(tmp_path, **SAID))) == APART


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"attention_mask": [1, 1, 1, 2, 2, 0, 0, 0]}, APART[:2]),
        ({"attention_mask": [0, 1, 1, 2, 2, 3, 3, 0]}, [([2, 3], [3]), APART[1], ([21, 22], [22])]),
        ({"segment_ids": [1, 1, 1, 2, 2, 0, 0, 0]}, APART[:2]),
        ({"seq_idx": [0, 0, 0, 1, 1, -1, -1, -1]}, APART[:2]),
        ({"seq_idx": [-1, 0, 0, 1, 1, 2, 2, 2]}, [([2, 3], [3]), *APART[1:]]),
        ({"attention_mask": [1, 1, 1, 1, 1, 0, 0, 0], "segment_ids": [1, 1, 1, 2, 2, 2, 2, 2]}, APART[:2]),
        ({"seq_lengths": [3, 2], "attention_mask": [1, 1, 1, 1, 1, 0, 0, 0]}, APART[:2]),
        ({"seq_lengths": [8]}, [(ROW, ROW[1:])]),  # as it is
        ({"seq_lengths": [3, 2, 3], "attention_mask": [1, 1, 0, 1, 1, 0, 1, 1]},
         [([1, 2], [2]), APART[1], ([22, 23], [23])]),
        ({"position_ids": [0, 1, 2, 0, 1, 0, 0, 0]}, APART[:2]),
        ({"position_ids": [9, 9, 0, 0, 1, 0, 1, 2], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 1]}, APART[1:]),
        ({"position_ids": [7, 8, 9, 0, 1, 0, 1, 2]}, APART),  # the first document begins in another row
    ],
)  # fmt: skip
def test_padding_and_beginnings(tmp_path: Path, columns: dict[str, Any], expected: Any) -> None:
    assert documents(read(tmp_path, rows(tmp_path, **columns))) == expected


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"seq_lengths": [3, 5], "position_ids": SAID["position_ids"]},
         "rows.jsonl:1: position_ids and seq_lengths bound other documents, from token 6 on"),
        ({"seq_lengths": [3, 2, 3], "position_ids": list(range(8))}, "bound other documents, from token 4 on"),
        ({"cu_seqlens": [0, 3, 8], "attention_mask": SAID["attention_mask"]}, "attention_mask and cu_seqlens bound"),
        ({"seq_lengths": [3, 2, 4]}, "seq_lengths is [3, 2, 4], of 8 tokens"),
        ({"seq_lengths": [3, 4]}, "seq_lengths is [3, 4], of 8 tokens"),
        ({"seq_lengths": [3, -1, 6]}, "seq_lengths is [3, -1, 6], of 8 tokens"),
        ({"seq_lengths": []}, "seq_lengths is [], of 8 tokens"),
        ({"cu_seqlens": [0, 3, 5]}, "cu_seqlens is [0, 3, 5], of 8 tokens"),
        ({"cu_seqlens": [3, 5, 8]}, "cu_seqlens is [3, 5, 8], of 8 tokens"),
        ({"cu_seqlens": [0, 5, 3, 8]}, "cu_seqlens is [0, 5, 3, 8]"),
        ({"position_ids": [0, 1, 2, 2, 3, 4, 5, 6]}, "position_ids goes from 2 to 2 at token 4"),
        ({"position_ids": [0, 1, 2, 7, 8, 0, 1, 2]}, "position_ids goes from 2 to 7 at token 4"),
        ({"segment_ids": [1, 1, 1, 2, 2, 1, 1, 1]}, "segment_ids goes from 2 to 1 at token 6"),
        ({"segment_ids": [-1, 1, 1, 2, 2, 1, 1, 1]}, "segment_ids goes from 2 to 1 at token 6"),
        ({"segment_ids": [-1, 1, 1, 2, 2, 2, 2, 2], "seq_lengths": [3, 3, 2]},
         "segment_ids and seq_lengths bound other documents, from token 7 on"),
        ({"segment_ids": [1, 1, 1, 0, 0, 2, 2, 2], "seq_lengths": [8]}, "bound other documents"),
        ({"segment_ids": [1, 1, 1, 0, 1, 1, 1, 1]}, "is 0 between tokens"),
        ({"position_ids": [0, 1, 2]}, "8 input_ids, and 3 position_ids"),
        ({"seq_lengths": 8}, "'seq_lengths' holds a int, not a list of integers"),
        ({"cu_seqlens": [[0, 8]]}, "'cu_seqlens' holds a list, not a list of integers"),
    ],
)  # fmt: skip
def test_odd_columns_are_refused_by_name(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, rows(tmp_path, **columns)).what


def test_an_error_names_the_document_of_a_row(tmp_path: Path) -> None:
    path = rows(tmp_path, input_ids=[1, 2, 3, 300, 12, 1, 1, 1], seq_lengths=[3, 2, 3])
    assert "rows.jsonl:1, document 2: token 1 is 300" in refusal(tmp_path, path).what


def test_rows_with_positions_of_one_document_are_not_packed(tmp_path: Path) -> None:
    data = read(tmp_path, rows(tmp_path, position_ids=list(range(8)), attention_mask=[1] * 8, token_type_ids=[0] * 8))
    assert documents(data) == [([*ROW, 256], [*ROW[1:], 256])]
    assert "EOS (256) added to 1" in line_of(data)
    assert any("left out: 'token_type_ids'" in line for line in data.counts.lines())


def test_a_row_of_one_document_in_a_packed_file_stays_as_it_is(tmp_path: Path) -> None:
    path = rows(tmp_path, position_ids=SAID["position_ids"])
    path.write_text(path.read_text() + json.dumps({"input_ids": [5, 6], "position_ids": [0, 1]}) + "\n")
    assert documents(read(tmp_path, path)) == [*APART, ([5, 6], [6])]


def test_a_packed_row_that_comes_late_in_a_file_stays_as_it_is(tmp_path: Path) -> None:
    path = rows(tmp_path, position_ids=SAID["position_ids"])
    alone = [{"input_ids": [5] * length, "position_ids": list(range(length))} for length in range(2, 19)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in alone) + path.read_text())
    found = documents(read(tmp_path, path))
    assert found[0] == ([5, 5, 256], [5, 256]) and found[17:] == APART


def test_other_bounds_are_other_data(tmp_path: Path) -> None:
    one, other = (read(tmp_path, rows(tmp_path, seq_lengths=lengths)) for lengths in ([3, 2, 3], [4, 4]))
    assert one.fingerprint != other.fingerprint


# ---- what TRL packs --------------------------------------------------------------------------------------------------

LENGTHS = (9, 17, 2, 5, 31, 11, 3, 47, 8, 13)  # beside an end of 256; the longest are longer than a row
LENGTH = 29


def examples(*, labelled: bool) -> dict[str, list[list[int]]]:
    ids = [[97 + at] * length + [256] for at, length in enumerate(LENGTHS)]
    asked = [max(1, length // 3) for length in LENGTHS]
    labels = [[IGNORE] * n + row[n:] for n, row in zip(asked, ids, strict=True)]
    return {"input_ids": ids} | ({"labels": labels} if labelled else {})


def packed(strategy: str, *, labelled: bool) -> Any:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl.data_utils")
    datasets.disable_progress_bars()
    return trl.pack_dataset(datasets.Dataset.from_dict(examples(labelled=labelled)), LENGTH, strategy)


def saved(packed: Any, folder: Path) -> Iterator[Path]:
    packed.to_parquet(str(folder / "rows.parquet"))
    packed.to_json(str(folder / "rows.jsonl"))
    yield from (folder / name for name in ("rows.parquet", "rows.jsonl"))


def of_trl(packed: Any) -> list[tuple[list[int], list[int]]]:
    """The documents of TRL's batches without padding, each with its targets."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    batch = DataCollatorForLanguageModeling(pad_token_id=256, padding_free=True)([*packed])
    ids, labels, edges = (batch[name].flatten().tolist() for name in ("input_ids", "labels", "cu_seq_lens_q"))
    both = [(ids[a:b], labels[a:b]) for a, b in pairwise(edges)]
    return [(row, [label for label in of[1:] if label != IGNORE]) for row, of in both]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("labelled", [False, True])
def test_sets_that_trl_packed_have_the_documents_of_its_batches(
    tmp_path: Path, strategy: str, labelled: bool, subtests: Subtests
) -> None:
    made = packed(strategy, labelled=labelled)
    assert ("seq_lengths" in made.column_names) == (strategy != "wrapped")
    expected = [piece for piece in of_trl(made) if piece[1]]
    for path in saved(made, tmp_path):
        with subtests.test(path.name):
            assert sorted(documents(read(tmp_path, path))) == sorted(expected)
            whole_rows = prepare(config_for(path), cache=tmp_path / "cache")  # packed again
            assert sorted(documents(whole_rows)) == sorted(expected)


def test_the_loss_is_that_of_transformers_over_the_packed_rows(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    made = packed("bfd", labelled=True)
    data = read(tmp_path, next(saved(made, tmp_path)))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, **sizes)).double()
    batch = DataCollatorForLanguageModeling(pad_token_id=256, padding_free=True)([*made])
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        theirs = _sum(model(**given, use_cache=False).logits[0, :-1], batch["labels"][0, 1:])
        ours = sum(_of_segments(model, data), torch.zeros((), dtype=torch.double))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def _of_segments(model: Any, data: PreparedData) -> Iterator[Any]:
    import torch

    for row in whole(data.whole):
        for ids, labels, positions in segments(row):
            logits = model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions])).logits[0]
            yield _sum(logits, torch.tensor(labels))


def _sum(logits: Any, labels: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)
