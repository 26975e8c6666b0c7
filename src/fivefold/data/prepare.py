"""From the run file to rows ready to be read: find the text and the tokenizer, tokenise once, pack, count.

Called before the process group exists, and again by every worker, which finds the results in the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from fractions import Fraction
from functools import cached_property, partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.config import DataSource, ObjectiveSection, RunConfig, check_named, check_streaming
from fivefold.core import history
from fivefold.core.cache import Progress, cache_root, key_of, say_aloud
from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.counts import DataCounts, RowCounts, SourceCounts
from fivefold.data.formats import discover
from fivefold.data.pack import for_ranks
from fivefold.data.rows import PackedRows, Pool, RowIndex, RowPacking, RowSource, kept_counts
from fivefold.data.source import FileList, Source, resolve
from fivefold.data.spans import Turn
from fivefold.data.split import Spans, bases_of, block_size, blocks_of, held_out, spans_of, store_at
from fivefold.data.store import BLOCK, Say, TokenStore, check_settings, store_for
from fivefold.data.stream import StreamedRows, settings_of
from fivefold.data.tokenizer import TokenizerInfo, find_tokenizer
from fivefold.data.units import TextUnits

_ROWS_VERSION = 1  # raise when the rows of the same tokens change
_SPLIT_VERSION = 2  # raise when the rows of runs with a held-out fraction change

Stores = tuple[TokenStore, ...]


@dataclass(frozen=True, eq=False)
class PreparedData:
    """The data of a run. `fingerprint` identifies the rows by origin: contents, weights, tokenizer, BOS, split,
    seq_length, packing and the order in a row. Runs with the same fingerprint and seed read the same batches. `files`:
    hashes of the files that were read whole, by name."""

    tokenizer: TokenizerInfo
    train: RowSource
    validation: PackedRows | None
    counts: DataCounts
    fingerprint: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> PackedRows:
        """All rows of training. Raises `UserError` if they are packed while training."""
        if isinstance(self.train, PackedRows):
            return self.train
        raise UserError("data.streaming: this needs all rows before the first step", fix="set data.streaming: false")

    @cached_property
    def converses(self) -> bool:
        """True if examples are written by the chat template: the first row has what it writes before an answer."""
        if not self.counts.train.examples:
            return False
        turns: list[Turn] = [{"role": "user", "content": "ok"}]
        try:
            asked, answering = (self.tokenizer.template.render(turns, answer=answer) for answer in (False, True))
        except UserError:  # a template of other turns
            return True
        (row,) = self.train.batch(0, global_batch_size=1, data_rank=0, data_ranks=1, micro_batch_size=1, row_multiple=1)
        text = self.tokenizer.load().decode(row.input_ids[0].tolist(), skip_special_tokens=False)
        return answering.removeprefix(asked).strip() in text


def prepare(
    config: RunConfig, *, progress: Progress | None = None, cache: Path | None = None, say: Say = say_aloud
) -> PreparedData:
    """Tokenise and pack the data of `config` into the cache (`cache`, else `cache_root()`), or find it there.

    Safe against concurrent callers. `say` reports damaged parts of the cache that are rebuilt. Raises `UserError` for
    bad input, naming file and row.
    """
    root = cache_root(cache)
    train, validation, tokenizer = inputs(config, root, progress)
    if config.data.streaming:
        return _streamed(config, root, train, validation, tokenizer, progress, say)

    def store_of(files: FileList) -> TokenStore:
        units = TextUnits.find(files, tokenizer, root)
        write = partial(units.join, progress=progress, say=say) if units else None
        store = store_for(files, tokenizer, root, progress, say, write)
        if units:
            units.close(store.folder)
        return store

    stores, held = tuple(map(store_of, train)), tuple(map(store_of, validation))
    _check_objective(config, [*zip(train, stores, strict=True), *zip(validation, held, strict=True)])
    weights = tuple(source.weight for source in config.data.train)
    plan = _Plan(stores, held, weights, config.data.fraction, RowPacking.of(config, tokenizer.eos_token_id))
    folder = root / "rows" / plan.key

    counts = kept_counts(folder, root, say, plan.build)
    pools = [Pool(weight, *numbers) for weight, numbers in zip(plan.pool_weights, counts["pools"], strict=True)]
    rows, held_rows = plan.packing.read(folder / "train", stores, counts["train"], pools), None
    if of_held := counts["validation"]:
        held_rows = plan.packing.read(folder / "validation", held or stores, of_held)
    every = (*stores, *held)
    return _prepared(
        config, tokenizer, train, validation, every, [vars(store.meta) for store in every], rows, held_rows, plan.key,
        sources=plan.sources(counts["sources"], train), repeated=counts["repeated"],
    )  # fmt: skip


def inputs(
    config: RunConfig, root: Path, progress: Progress | None = None
) -> tuple[list[FileList], list[FileList], TokenizerInfo]:
    """The files of `data.train` and of a validation list, and the tokenizer. Raises `UserError`."""
    check_streaming(config)
    train, validation = _files(config, root)
    tokenizer = find_tokenizer(
        config.tokenizer.name_or_path, model=config.model.name_or_path, corpus=train, root=root, progress=progress,
        bos=config.data.bos,
    )  # fmt: skip
    day = history.first_day(config.run_dir) or date.today()
    return train, validation, replace(tokenizer, template=tokenizer.template.on(day))


def _files(config: RunConfig, root: Path) -> tuple[list[FileList], list[FileList]]:
    check_named(config)
    formats, objective = discover(), config.objective
    held = config.data.validation
    lists = {"data.train": config.data.train, "data.validation": held if isinstance(held, tuple) else ()}
    train, validation = (
        [
            resolve(_source(one, name if len(sources) == 1 else f"{name}[{i}]", objective), formats, root)
            for i, one in enumerate(sources)
        ]
        for name, sources in lists.items()
    )
    return train, validation


def _check_objective(config: RunConfig, stores: Sequence[tuple[FileList, TokenStore]]) -> None:
    """Raise `UserError` if the records are not of the kind that the objective trains."""
    name, has_answers = config.objective.name, config.objective.has_answers
    for files, store in stores:
        if store.meta.pairs and not has_answers:
            raise UserError(
                f"{files.source.label}: {files.name} holds preference records, and objective.name is {name}",
                fix="set objective.name: dpo; or train on the chosen answers alone: format: chat and columns: "
                "{messages: chosen}, or columns: {prompt: prompt, completion: chosen} where they are texts",
                more="fivefold docs howto/preferences",
            )
        if store.meta.numbers != config.objective.columns:
            raise UserError(
                f"{files.source.label}: the token store {files.name} has the numbers {list(store.meta.numbers)}, and "
                f"objective.columns is {list(config.objective.columns)}",
                fix="name the records that it was made from",
                more="fivefold docs howto/losses",
            )
        if store.meta.rated != config.objective.is_rated and store.meta.pairs:  # an older store
            raise UserError(
                f"{files.source.label}: {files.name} holds {'rated answers' if store.meta.rated else 'pairs'}, and "
                f"objective.name is {name}",
                fix=f"set objective.name: {'kto' if store.meta.rated else 'dpo'}, or name the records themselves",
                more="fivefold docs howto/preferences",
            )
        if not store.meta.pairs and has_answers:
            raise UserError(
                f"{files.source.label}: {files.name} holds no preference records, and objective.name is {name}",
                fix=f"name the two answers, {files.source.label}.columns: {{chosen: KEY, rejected: KEY}}; or set "
                "objective.name: sft",
                more="fivefold docs howto/preferences",
            )


def _source(given: DataSource, label: str, objective: ObjectiveSection) -> Source:
    if given.weight != 1.0 and label.startswith("data.validation"):
        raise UserError(
            f"{label}.weight: {given.weight:g}: evaluation reads every row of a validation list once",
            fix=f"leave {label}.weight out",
        )
    return Source(
        given.path, label, given.format, given.text_key, dict(given.columns.items()), given.train_on,
        pairs=objective.has_answers, rates=objective.is_rated, numbers=objective.columns,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything that determines the rows."""

    stores: Stores
    held: Stores  # those of a validation list
    weights: tuple[float, ...]  # one per store
    fraction: float
    packing: RowPacking

    @property
    def key(self) -> str:
        contents = [[[store.meta.content, store.meta.tokenizer] for store in side] for side in (self.stores, self.held)]
        ratios = [str(Fraction(weight) / Fraction(max(self.weights))) for weight in self.weights]
        weighted = [ratios] if len(self.pool_weights) > 1 else []
        bos = [{"bos": self.bos}] if self.bos else []
        version, packing = _SPLIT_VERSION if self.fraction else _ROWS_VERSION, self.packing
        others = [*weighted, *bos, *for_ranks(packing.ranks)]
        return key_of(version, contents, self.fraction, packing.seq_length, packing.joins, *others)

    @property
    def bos(self) -> tuple[int, ...]:
        """The tokens in front of each document; the same in all stores of a run."""
        return self.stores[0].meta.bos

    @property
    def block(self) -> int:
        """Tokens of a block, which goes to one side of the split."""
        return block_size(sum(store.meta.tokens for store in self.stores), self.fraction) if self.fraction else BLOCK

    @property
    def pool_weights(self) -> list[float]:
        """The different weights, in the order of their first source. Sources of one weight are packed together."""
        return list(dict.fromkeys(self.weights))

    def build(self, folder: Path) -> dict[str, Any]:
        """Write the row indices of both sides, and return their counts."""
        # Arrays of all blocks are large: free them before rows are packed.
        spans, held, repeated = self._split()
        counts: dict[str, Any] = {
            **self._training(folder / "train", spans),
            "validation": None,
            "repeated": repeated,
        }
        _check_rows(RowCounts(**counts["train"]), self.packing.seq_length)
        if held:
            counts["validation"] = self.packing.write(folder / "validation", self.held or self.stores, held)
        return counts

    def _split(self) -> tuple[Spans, Spans | None, int]:
        """The spans of both sides, and the number of blocks of a validation list that are in the training text too."""
        blocks = blocks_of(self.stores, self.block)
        out = held_out(blocks, self.fraction)
        train = spans_of(blocks, ~out)
        if not self.held:
            return train, spans_of(blocks, out) if out.any() else None, 0
        other = blocks_of(self.held)
        repeated = int(np.isin(other.hash, blocks.hash).sum())  # with a fraction the hash keeps them apart
        return train, spans_of(other, np.ones(len(other.hash), np.bool_)), repeated

    def _training(self, folder: Path, spans: Spans) -> dict[str, Any]:
        """Write the rows, pool after pool, and return their counts: in total, per pool and per source."""
        bases = bases_of(self.stores)
        weight_of = np.array(self.weights)[store_at(bases, spans[0])]
        pools = [weight_of == weight for weight in self.pool_weights]
        built = [self.packing.index(self.stores, (spans[0][pool], spans[1][pool])) for pool in pools]
        index = RowIndex.join([index for index, _ in built])
        index.save(folder)
        tokens = np.zeros(len(self.stores), np.int64)
        np.add.at(tokens, store_at(bases, index.pieces.start), index.pieces.length)
        return {
            "train": asdict(reduce(add, [counts for _, counts in built])),
            "pools": [[counts.rows, counts.tokens] for _, counts in built],
            "sources": tokens.tolist(),
        }

    def sources(self, tokens: Sequence[int], files: Sequence[FileList]) -> tuple[SourceCounts, ...]:
        """The counts of each source; `tokens`: its tokens in the rows."""
        drawn = [number * Fraction(weight) for number, weight in zip(tokens, self.weights, strict=True)]
        shares = [float(part / sum(drawn)) for part in drawn]
        return tuple(
            SourceCounts(one.name, store.meta.documents, number, weight, share)
            for one, store, number, weight, share in zip(files, self.stores, tokens, self.weights, shares, strict=True)
        )


def _check_rows(counts: RowCounts, seq_length: int) -> None:
    if counts.rows:
        return
    if pairs := counts.too_long:
        raise UserError(
            f"data.train: no pair of answers fits in a row ({many(pairs, 'pair')})",
            fix=f"set a data.seq_length above {seq_length}: a pair is two prompts with their answers",
        )
    if examples := counts.untrained:
        raise UserError(
            f"data.train: no document has a trained token ({many(examples, 'example')})",
            fix="add answers, or set data.train[].train_on: all, or a longer data.seq_length",
        )
    raise UserError(f"data.train: no document has two tokens or more ({counts.spans:,} documents)", fix="add text")


def _prepared(
    config: RunConfig, tokenizer: TokenizerInfo, files: Sequence[FileList], held: Sequence[FileList], stores: Stores,
    metas: Sequence[Mapping[str, Any]], train: RowSource, validation: PackedRows | None, fingerprint: str, *,
    sources: tuple[SourceCounts, ...] = (), repeated: int = 0, streamed: str = "",
) -> PreparedData:  # fmt: skip
    """The data of a run, of `files` and those of its validation list, whose tokens are in `stores`. `metas`: reports on
    them, as in `StoreMeta`. `validation`: None if no text was held out."""
    every = (*files, *held)
    return PreparedData(
        tokenizer=tokenizer,
        train=train,
        validation=validation or None,  # None if it has no rows
        counts=DataCounts(
            files=sum(len(one.files) for one in every),
            files_left_out=sum(len(one.left_out) for one in every),
            documents=sum(store.meta.documents for store in stores),
            tokens=sum(store.meta.tokens for store in stores),
            bos=_bos_line(tokenizer, stores),
            tokenizer=_remarks(tokenizer, stores),
            answers_alone=tuple(line for meta in metas for line in meta["answers_alone"]),
            **{kind: tuple(meta[kind] for meta in metas if meta[kind]) for kind in ("columns", "ids", "odd")},
            seq_length=train.seq_length,
            train=train.sample.counts,
            sources=sources,
            validation=None if validation is None else validation.counts,
            validation_asked=bool(config.data.validation),
            repeated=repeated,
            fraction=config.data.fraction,
            streamed=streamed,
            held=tuple(one.name for one in held),
        ),
        fingerprint=fingerprint,
        files={name: digest for one in every for name, digest in one.named.items()},
    )


def _streamed(
    config: RunConfig, root: Path, train: list[FileList], validation: list[FileList], tokenizer: TokenizerInfo,
    progress: Progress | None, say: Say,
) -> PreparedData:  # fmt: skip
    """The data of a run that tokenises while training: its first window, and a validation list as a whole."""
    data = config.data
    for files in train:
        check_settings(files)
        if files.store:
            raise UserError(
                f"data.streaming: {files.source.label}: {files.name} is a token store, which is tokenised already",
                fix="set data.streaming: false",
            )
    units = tuple(TextUnits.begin(files, tokenizer, root, streamed=True) for files in train)
    for source in units:  # no file is read whole, so their sizes and times stand for them
        stamps = zip(source.files.files, source.state, strict=True)
        source.files.known.update({path: f"{size:,} bytes of {time}" for (path, _), (_, size, time, *_) in stamps})
    rows = StreamedRows(
        config, units, root=root, tokenizer=tokenizer, say=say, progress=progress,
        check=lambda files, store: _check_objective(config, [(files, store)]),
    )  # fmt: skip
    stores = tuple(store_for(files, tokenizer, root, progress, say) for files in validation)
    _check_objective(config, list(zip(validation, stores, strict=True)))
    held = _held_rows(stores, rows.packing, root, say) if stores else rows.held_out()
    first = rows.sample
    _check_rows(first.counts, data.seq_length)
    metas = [*settings_of(units, rows.first), *(vars(store.meta) for store in stores)]
    total = sum(len(source.units) for source in units)
    fingerprint = key_of(rows.fingerprint, [[store.meta.content, store.meta.tokenizer] for store in stores])
    return _prepared(
        config, tokenizer, train, validation, (*first.stores, *stores), metas, rows, held, fingerprint,
        streamed=f"{', '.join(one.name for one in train)}: {many(total, 'unit')} of text in "
        f"{many(rows.order.windows, 'window')}; of the first window:",
    )  # fmt: skip


def _held_rows(stores: Stores, packing: RowPacking, root: Path, say: Say) -> PackedRows:
    blocks = blocks_of(stores)
    spans = spans_of(blocks, np.ones(len(blocks.hash), np.bool_))

    def build(folder: Path) -> dict[str, Any]:
        return {"validation": packing.write(folder / "validation", stores, spans)}

    contents = [[store.meta.content, store.meta.tokenizer] for store in stores]
    key = key_of("validation", _ROWS_VERSION, contents, packing.seq_length, packing.joins, *for_ranks(packing.ranks))
    folder = root / "rows" / key
    counts = kept_counts(folder, root, say, build)["validation"]
    return packing.read(folder / "validation", stores, counts)


def _is_rendered(stores: Stores) -> bool:
    """True if there are examples of records; those of token ids were rendered by another engine."""
    return any(store.meta.trained is not None and not store.meta.ids for store in stores)


def _remarks(tokenizer: TokenizerInfo, stores: Stores) -> tuple[str, ...]:
    """Lines about the tokenizer, and its template if conversations are written by it."""
    converses = _is_rendered(stores)
    return (*tokenizer.remarks(converses=converses), *(tokenizer.template.remarks() if converses else ()))


def _bos_line(tokenizer: TokenizerInfo, stores: Stores) -> str:
    """The line about BOS; empty if neither the run nor the tokenizer has any."""
    if tokenizer.bos_token_ids:
        return f"BOS {tokenizer.bos} in front of each document" + (
            " that the chat template does not write" if _is_rendered(stores) else ""
        )
    return f"no BOS (data.bos: false), though the tokenizer puts {tokenizer.bos}" if tokenizer.template_ids else ""
