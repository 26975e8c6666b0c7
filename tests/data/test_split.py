"""The validation split by the hash of a block's content, and the packing of pieces."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.data import PackedRows, prepare
from fivefold.data import pack as pack_module
from fivefold.data.pack import pack
from fivefold.data.rows import RowIndex
from fivefold.data.split import block_size, blocks_of
from fivefold.data.store import BLOCK, block_hashes, open_store
from tests.data.helpers import SEQ, byte_tokens, config_for, pieces, prepare_texts, random_texts, whole, write_jsonl


def test_duplicates_stay_on_one_side(tmp_path: Path) -> None:
    texts = random_texts(0, 101)
    data = prepare_texts(tmp_path, texts * 3, validation=0.3, seq_length=509)
    assert data.validation is not None
    train, validation = _inputs(data.train), _inputs(data.validation)
    assert train and validation and not set(train) & set(validation)
    assert all(count % 3 == 0 for count in (train | validation).values())
    documents = Counter(tuple(byte_tokens(text)) for text in texts * 3 if text)
    assert train + validation == documents  # seq_length is longer than any of them


def test_the_fraction_is_about_what_was_asked(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, [f"document {number}" for number in range(2000)], validation=0.1)
    assert data.validation is not None
    assert 150 < data.validation.counts.spans < 250


def test_a_side_does_not_depend_on_the_other_documents(tmp_path: Path) -> None:
    """Where there are so many that chance alone comes near to what was asked."""
    texts = [f"document {number}" for number in range(5003)]
    (tmp_path / "less").mkdir()
    all_of_them = prepare_texts(tmp_path, texts, validation=0.2).validation
    without_some = prepare_texts(tmp_path / "less", texts[::2], validation=0.2).validation
    assert all_of_them and without_some
    assert set(_inputs(without_some)) == set(_inputs(all_of_them)) & {tuple(byte_tokens(text)) for text in texts[::2]}


def test_a_long_document_is_split_by_blocks_and_no_target_crosses(tmp_path: Path) -> None:
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh"), 11 * BLOCK + 577))
    data = prepare_texts(tmp_path, [text], validation=0.4, seq_length=4099)
    tokens = byte_tokens(text)
    assert block_size(len(tokens), 0.4) == BLOCK
    assert data.validation is not None
    train, validation = data.counts.train, data.validation.counts
    assert train.spans > 1 and validation.spans >= 1
    assert train.tokens + validation.tokens + train.without_target + validation.without_target == len(tokens)
    # A span's last token has no target, and every span but the document's last ends inside the document.
    assert train.targets + validation.targets == len(tokens) - train.spans - validation.spans
    blocks = {side: _blocks(rows, tokens) for side, rows in (("train", data.train), ("held", data.validation))}
    assert not blocks["train"] & blocks["held"] and blocks["train"] | blocks["held"] == set(range(12))


@pytest.mark.parametrize("fraction", [0.2, 0.999999])
def test_each_side_gets_a_block_when_there_are_two(tmp_path: Path, fraction: float) -> None:
    data = prepare_texts(tmp_path, ["one", "another", "one", ""], validation=fraction)
    assert data.validation is not None
    assert sorted(_inputs(data.train)) + sorted(_inputs(data.validation)) in (
        [tuple(byte_tokens("one")), tuple(byte_tokens("another"))],
        [tuple(byte_tokens("another")), tuple(byte_tokens("one"))],
    )


def test_a_single_block_is_training_text_and_that_is_said(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, ["only", "only", ""], validation=0.5)
    assert data.validation is None and len(data.train) == 1
    assert "too short to hold some of it out" in data.counts.lines()[-1]


def test_a_validation_list_is_read_like_train_and_repeats_are_counted(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", ["one", "two", "three"])
    held = write_jsonl(tmp_path / "held.jsonl", ["two", "four", ""])
    config = config_for(train, validation=[{"path": str(held)}])
    data = prepare(config, cache=tmp_path / "cache")
    assert data.validation is not None and data.counts.repeated == 1
    assert _inputs(data.validation) == Counter(tuple(byte_tokens(text)) for text in ("two", "four"))
    assert "in the training text too: 1 block of validation" in data.counts.lines()[-1]


def test_a_validation_list_without_a_target_is_said_and_one_of_two_sources_is_named(tmp_path: Path) -> None:
    held = write_jsonl(tmp_path / "held.jsonl", [""])
    data = prepare_texts(tmp_path, ["ab"], validation=[{"path": str(held)}])
    assert data.validation is None and data.counts.validation_asked
    sources = [{"path": str(held)}, {"path": str(tmp_path / "nowhere")}]
    with pytest.raises(UserError, match=r"^data\.train\[1\]: .*nowhere does not exist"):
        prepare(config_for(sources), cache=tmp_path / "cache")


def test_sources_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", texts) for name, texts in (("a", ["one"]), ("b", ["two", "three"]))
    ]
    data = prepare(config_for([{"path": str(path)} for path in paths], packing=False), cache=tmp_path / "cache")
    read = [tokens for batch in whole(data.train) for tokens, _ in pieces(batch)]
    assert read == [byte_tokens(text) for text in ("one", "two", "three")]


@pytest.mark.parametrize("capacity", [1, 2, 61, 1024])
@pytest.mark.parametrize("seed", range(3))
def test_packing_places_every_piece_once_in_order_and_within_capacity(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, capacity + 1, 1009).astype(np.int32)
    offsets, order = pack(lengths, capacity)
    rows = [order[start:end].tolist() for start, end in pairwise(offsets)]
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= capacity for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # Best fit decreasing needs at most 11/9 of the best number of rows, and 6/9 of one more.
    assert len(rows) <= 11 / 9 * -(-int(lengths.sum()) // capacity) + 1 or _more_than_half(lengths, capacity) == len(
        rows
    )


def _more_than_half(lengths: np.ndarray, capacity: int) -> int:
    """A lower bound of the rows: no two of these fit together."""
    return int((2 * lengths > capacity).sum())


def test_many_pieces_are_packed_some_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "_WINDOW", 7)
    lengths = np.random.default_rng(1).integers(1, 62, 100).astype(np.int32)
    offsets, order = pack(lengths, 61)
    assert sorted(order.tolist()) == list(range(100)) and offsets[-1] == 100
    assert max(lengths[order[start:end]].sum() for start, end in pairwise(offsets)) <= 61


def test_rows_that_are_packed_are_kept_apart_from_those_that_are_not(tmp_path: Path) -> None:
    packed, apart = (prepare_texts(tmp_path, ["one", "two", "three"], packing=packing) for packing in (True, False))
    assert (len(packed.train), len(apart.train)) == (1, 3) and packed.fingerprint != apart.fingerprint


def test_packing_nothing_gives_no_row() -> None:
    offsets, order = pack(np.zeros(0, np.int32), 7)
    assert offsets.tolist() == [0] and order.tolist() == []


def _inputs(rows: PackedRows) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tokens) for batch in whole(rows) for tokens, _ in pieces(batch))


def _blocks(rows: PackedRows, tokens: list[int]) -> set[int]:
    """Which blocks of the document the rows are from."""
    text = bytes(token % 256 for token in tokens)
    found = set()
    for batch in whole(rows):
        for inputs, _ in pieces(batch):
            start = text.index(bytes(token % 256 for token in inputs))
            found |= {start // BLOCK, (start + len(inputs) - 1) // BLOCK}
    return found


def test_what_the_held_out_blocks_leave_of_one_document_is_not_called_documents(tmp_path: Path) -> None:
    data = prepare_texts(
        tmp_path,
        ["".join(np.random.default_rng(0).choice(list("abcdefgh"), 11 * BLOCK))],
        validation=0.2,
        seq_length=4099,
    )
    assert data.counts.train.split > 1
    lines = data.counts.lines()
    assert lines[0].startswith("1 document in 1 file")
    assert f"{data.counts.train.split} pieces of text cut over rows" in lines[1] and "document" not in lines[1]


@pytest.mark.parametrize(
    ("size", "fraction"),
    [(20_000, 0.01), (60_000, 0.01), (250_000, 0.01), (500_000, 0.01), (20_000, 0.05), (120_000, 0.3)],
)
def test_what_is_held_out_of_one_text_is_near_what_was_asked(tmp_path: Path, size: int, fraction: float) -> None:
    """Where 1% was asked of them, 0%, 27.7%, 16.7% and 8.1% of the first four were held out."""
    data = prepare_texts(tmp_path, [letters(size)], validation=fraction, seq_length=128)
    assert data.counts.held_out == pytest.approx(fraction, rel=0.13)
    assert f"{100 * data.counts.held_out:.3g}% of the tokens, {100 * fraction:g}% asked" in data.counts.lines()[2]


@pytest.mark.parametrize("documents", [20, 300, 2222])
def test_what_is_held_out_of_documents_is_near_what_was_asked(tmp_path: Path, documents: int) -> None:
    rng = np.random.default_rng(0)
    texts = [letters(int(length), seed) for seed, length in enumerate(rng.integers(5, 300, documents))]
    data = prepare_texts(tmp_path, texts, validation=0.05)
    assert data.counts.held_out == pytest.approx(0.05, rel=0.5 if documents < 300 else 0.13)


def test_the_text_of_a_tokenizer_that_merges_is_held_out_alike(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, [letters(60_000)], validation=0.01, tokenizer="train:1024", seq_length=128)
    assert data.counts.held_out == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize("size", [3, 500, 1500])
def test_a_text_too_small_to_hold_some_out_is_said(tmp_path: Path, size: int) -> None:
    data = prepare_texts(tmp_path, [letters(size)], validation=0.01)
    assert data.validation is None and data.counts.held_out == 0
    assert "validation  none; 0% of the tokens, 1% asked" in data.counts.lines()[2]
    assert "too short to hold some of it out" in data.counts.lines()[-1]


def test_a_small_split_is_fixed_by_the_contents_alone(tmp_path: Path) -> None:
    """In whatever order and files the documents lie, and with copies of them on one side."""
    texts = [letters(701, seed) for seed in range(60)]
    (tmp_path / "other").mkdir()
    first = prepare_texts(tmp_path, texts * 2, validation=0.05, packing=False, seq_length=1021)
    other = prepare_texts(tmp_path / "other", [*texts[::-1], *texts], validation=0.05, packing=False, seq_length=1021)
    assert first.validation and other.validation
    assert _inputs(first.validation) == _inputs(other.validation) and _inputs(first.train) == _inputs(other.train)
    assert not set(_inputs(first.train)) & set(_inputs(first.validation))
    assert all(count % 2 == 0 for count in _inputs(first.validation).values())


def test_finer_blocks_leave_whole_documents_their_hash(tmp_path: Path) -> None:
    texts = ["", "short", letters(3 * BLOCK + 5), "another", letters(200)]
    prepare_texts(tmp_path, texts)
    (folder,) = (tmp_path / "cache" / "stores").glob("*/")
    store = open_store(folder, tmp_path)
    coarse, fine = (blocks_of([store], size) for size in (BLOCK, 64))
    short = np.isin(coarse.document, [0, 1, 3])
    assert coarse.hash[short].tolist() == fine.hash[np.isin(fine.document, [0, 1, 3])].tolist()
    assert fine.length.max() == 64 and fine.length.sum() == coarse.length.sum()
    for start, length, found in zip(fine.start.tolist(), fine.length.tolist(), fine.hash.tolist(), strict=True):
        assert block_hashes([store.tokens[start : start + length]], BLOCK) == [found]


def letters(size: int, seed: int = 0) -> str:
    """Words of random letters, so that no two blocks are alike."""
    return "".join(np.random.default_rng(seed).choice(list("abcdefgh  \n"), size))


def test_arrays_of_an_index_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, random_texts(0))
    data.train.index.save(tmp_path / "index")
    assert len(RowIndex.load(tmp_path / "index")) == len(data.train)
    np.save(tmp_path / "index" / "offsets.npy", data.train.index.offsets[:-1])
    with pytest.raises(ValueError, match="the arrays do not belong together"):
        RowIndex.load(tmp_path / "index")


def test_a_document_without_a_target_is_not_one_without_trained_tokens(tmp_path: Path) -> None:
    counts = prepare_texts(tmp_path, ["", "ab"]).counts.train
    assert (counts.without_target, counts.untrained) == (1, 0)


def test_what_names_rows_is_the_same_in_every_version(tmp_path: Path) -> None:
    """Else no run of before goes on."""
    for fraction, version in ((0.0, 1), (0.5, 2)):
        data = prepare_texts(tmp_path, random_texts(0), validation=fraction)
        contents = [[[store.meta.content, store.meta.tokenizer] for store in data.train.stores], []]
        assert data.fingerprint == key_of(version, contents, fraction, SEQ, True)
