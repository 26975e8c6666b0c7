"""The slices that a rule says are those of a list: of random cuts, and of every rank of real layouts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from fivefold.checkpoint.cut import Box, TensorCut, box, meet, placed, tiles
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.records import FileRecord, Slice, TensorRecord, check_record
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.sharding import ShardSpec, Split, local_regions, split_even
from tests.parity import Case, hf_config

SIZES = (1, 2, 3, 5, 7, 11, 13, 31)  # primes, so that last shards are short and some are empty


def dealt(size: int, parts: int, pieces: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Blocks of a dimension that is `pieces` matrices, each split over all parts."""
    edges = [*range(0, size, max(1, size // pieces)), size]
    cut = [[(start + a, start + b) for a, b in split_even(stop - start, parts)] for start, stop in pairwise(edges)]
    return tuple(tuple(piece[part] for piece in cut) for part in range(parts))


def random_cut(rng: random.Random) -> tuple[tuple[int, ...], TensorCut]:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))
    over, copies = rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2))
    splits, parts = [], over * copies  # neighbours that are copies hold the same blocks
    if shape and over > 1:
        dim = rng.randrange(len(shape))
        blocks = dealt(shape[dim], over, rng.choice((1, 2, 3)))
        splits.append(Split(dim, tuple(blocks[part // copies] for part in range(parts))))
        if len(shape) > 1 and rng.random() < 0.4:  # experts, and features of each
            other = next(at for at in range(len(shape)) if at != dim)
            inner = rng.choice((2, 3))
            again = dealt(shape[other], inner, 1)
            splits = [
                Split(dim, tuple(own for own in splits[0].blocks for _ in range(inner))),
                Split(other, again * parts),
            ]
            parts *= inner
    return shape, TensorCut(parts, rng.choice((1, 2, 3, 5, 8, 40)), tuple(splits))


def listed(shape: tuple[int, ...], cut: TensorCut) -> list[Slice]:
    """The slices of every rank, one after the other, by the functions that shard a parameter."""
    spec = ShardSpec("", shape, cut.splits, cut.parts)
    return [
        Slice(shard * cut.parts + part, box(region))
        for shard in range(cut.shards if shape else 1)  # a scalar is the first shard's
        for part in range(cut.parts)
        if spec.is_owner(part)
        for region, _ in local_regions(spec, part, shard, cut.shards)
    ]


def boxes(shape: tuple[int, ...], rng: random.Random) -> Iterator[Box]:
    """Random regions of a tensor, and all of it."""
    yield tuple((0, size) for size in shape)
    for _ in range(6):
        yield tuple((start := rng.randint(0, size), rng.randint(start, size)) for size in shape)


def test_a_rule_says_the_slices_of_a_list() -> None:
    rng, several, empty = random.Random(5), 0, 0
    for _ in range(400):
        shape, cut = random_cut(rng)
        record, expected = TensorRecord(shape=shape, dtype="float32", cut=cut, rank=17), listed(shape, cut)
        assert sorted(expected, key=repr) == sorted((replace(s, rank=s.rank - 17) for s in record.slices), key=repr)
        assert record.first == min((17 + one.rank for one in expected), default=None)
        count = np.zeros(shape, int)
        for one in expected:
            count[tuple(slice(*edge) for edge in one.box)] += 1
        assert (count == 1).all()
        for wanted in boxes(shape, rng):
            found = {(one.rank - 17, one.box) for one in record.overlapping(wanted)}
            assert found == {(one.rank, one.box) for one in expected if meet(one.box, wanted)}
        several += any(len(part) > 1 for split in cut.splits for part in split.blocks)
        empty += len({one.rank for one in expected}) < cut.parts * cut.shards
    assert several > 30 and empty > 30


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", ("single", "shard5", "tp4", "dp2.shard3.tp2", "pp2.shard7", "pp2+zbv", "cp2.tp2", "pp2.shard67")),
        ("phi3", ("tp2.shard3",)),
        ("mixtral", ("shard2.ep2", "shard4.tp2.ep4", "shard2.tp2.ep2+etp", "dp2.pp2.shard4.ep4", "shard3.tp2+etp")),
    ],
)  # fmt: skip
def test_a_placement_is_told_by_rules(family: str, layouts: tuple[str, ...], subtests: pytest.Subtests) -> None:
    """What every rank of a layout saves, rank by rank, is what one rule for each tensor says; through JSON."""
    facts = facts_of(build_meta(hf_config(Case("single", family, overrides=(("num_hidden_layers", 4),)))))
    for text in layouts:
        with subtests.test(msg=text):
            layout = Layout.parse(text)
            ranks = [lower(facts, layout, rank).placement for rank in range(layout.world)]
            expected: dict[str, set[tuple[int, Box]]] = {}
            records: dict[str, TensorRecord] = {}
            for own in ranks:
                for name in own.shards:
                    if own.holds(name) and own.is_owner(name):
                        regions = {(own.rank, box(region)) for region, _ in own.regions(name)}
                        expected[name] = expected.get(name, set()) | regions
                        cut, first = placed(own, name)
                        assert placed(ranks[0], name, own.rank) == (cut, first)  # as any rank knows
                        found = TensorRecord(shape=own.shards[name].shape, dtype="float32", cut=cut, rank=first)
                        assert records.setdefault(name, found) == found  # of every rank that writes some
            files = {f"weight-{rank:05d}.safetensors": FileRecord(1, "") for rank in range(layout.world)}
            manifest = Manifest(
                step=1, layout=text, versions={}, agreement={}, state={}, files=files, scalars={},
                tensors={"weight": records},
            )  # fmt: skip
            read = Manifest.from_json(manifest.to_json(), where="here").tensors["weight"]
            assert read == records
            assert {name: {(one.rank, one.box) for one in record.slices} for name, record in read.items()} == expected


def test_a_number_of_another_rule_is_seen() -> None:
    """Each of these says slices that do not tile the tensor, or lie in no file."""
    blocks = (((0, 2), (4, 6)), ((2, 4), (6, 7)))
    good = TensorRecord(shape=(7, 3), dtype="float32", cut=TensorCut(2, 2, (Split(0, blocks),)), rank=4)
    check_record("weight", "w", good, {4, 5, 6, 7})
    ranks, whole = {4, 5, 6, 7}, replace(good, cut=TensorCut(2, 2, ()))
    for other, wrong in {
        "shape": (replace(good, shape=(8, 3)), "do not add up"),
        "a dimension fewer": (
            replace(good, shape=(7,), cut=TensorCut(2, 2, (Split(1, blocks),))),
            "a split of dimension 1",
        ),
        "block": (_blocks(good, (((0, 2), (4, 6)), ((2, 5), (6, 7)))), "that overlap"),
        "gap": (_blocks(good, (((0, 2), (4, 6)), ((3, 4), (6, 7)))), "do not add up"),
        "outside": (_blocks(good, (((0, 2), (4, 6)), ((2, 4), (6, 9)))), "leaves dimension 0"),
        "negative": (_blocks(good, (((-1, 2), (4, 6)), ((2, 4), (6, 7)))), "leaves dimension 0"),
        "a part too many": (replace(good, cut=TensorCut(3, 2, (Split(0, blocks),))), "into 2 parts"),
        "no parts": (replace(whole, cut=TensorCut(0, 2)), "a cut into 0 parts"),
        "no shards": (replace(whole, cut=TensorCut(1, 0)), "a cut into 1 parts and 0 shards"),
        "parts beyond any": (replace(whole, cut=TensorCut(10**12, 2)), "a cut into"),
        "shards": (replace(good, cut=TensorCut(2, 3, (Split(0, blocks),))), "'weight-00009.safetensors' is not listed"),
        "rank": (replace(good, rank=3), "'weight-00003.safetensors' is not listed"),
        "dtype": (replace(good, dtype="uint16"), "dtype"),
        "another slice": (replace(good, instead={5: (((2, 3), (0, 3)),)}), "do not add up"),
        "a slice twice": (replace(good, instead={5: (((0, 2), (0, 3)),)}), "overlap"),
    }.values():
        with pytest.raises(ValueError, match=wrong):
            check_record("weight", "w", other, ranks)


def test_slices_of_a_rank_that_has_others_than_the_rule_says_stand_in_the_place_of_those() -> None:
    record = TensorRecord(shape=(4, 2), dtype="float32", cut=TensorCut(1, 2))
    other = replace(record, instead={0: (((0, 1), (0, 2)),), 1: (((1, 4), (0, 2)),)})
    for one, slices in ((record, [(0, 0, 2), (1, 2, 4)]), (other, [(0, 0, 1), (1, 1, 4)])):
        expected = [Slice(rank, ((start, stop), (0, 2))) for rank, start, stop in slices]
        assert [*one.slices] == expected == [*one.overlapping(((0, 4), (0, 2)))]
        assert [*one.overlapping(((1, 2), (0, 1)))] == [each for each in expected if meet(each.box, ((1, 2), (0, 1)))]


def test_a_manifest_looks_at_each_tensor_that_is_not_cut_as_another() -> None:
    """By another rule, from another rank on, and with slices of its own."""
    good = TensorRecord(shape=(4, 2), dtype="float32", cut=TensorCut(1, 2))
    files = {f"weight-{rank:05d}.safetensors": FileRecord(1, "") for rank in range(2)}

    def manifest(other: TensorRecord) -> Manifest:
        return Manifest(
            step=1, layout="shard2", versions={}, agreement={}, state={}, files=files, scalars={},
            tensors={"weight": {"one": good, "other": other}},
        )  # fmt: skip

    manifest(good).check()
    for other, wrong in (
        (replace(good, cut=TensorCut(1, 4)), "not listed"), (replace(good, rank=1), "not listed"),
        (replace(good, instead={1: (((2, 3), (0, 2)),)}), "do not add up"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"weight of other: .*{wrong}"):
            manifest(other).check()


def _blocks(record: TensorRecord, blocks: tuple[tuple[tuple[int, int], ...], ...]) -> TensorRecord:
    assert record.cut
    return replace(record, cut=replace(record.cut, splits=(Split(0, blocks),)))


def test_a_region_of_millions_of_slices_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of them is made: as many are looked at as the region has."""
    record = TensorRecord(shape=(10**9, 4), dtype="float32", cut=TensorCut(1, 10**8), rank=0)
    looked, plain = [], type(tiles(record.shape, TensorCut(1, 10**8))).boxes
    monkeypatch.setattr(
        "fivefold.checkpoint.cut.Tiles.boxes", lambda self, place: looked.append(place) or plain(self, place)
    )
    found = list(record.overlapping(((123_456_785, 123_456_805), (0, 4))))
    assert looked == [12_345_678, 12_345_679, 12_345_680] == [one.rank for one in found]
    assert prod(stop - start for start, stop in found[0].box) == 40
