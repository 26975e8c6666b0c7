"""Documents from records, which are JSON objects or table rows: a text, or an example of a conversation or of a prompt
with its answer.

`_NAMES` maps column names to their meaning, and `_FORMS` lists the columns of each kind of example. Unused columns are
named in the report of a run's data.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data import examples
from fivefold.data.batch import IGNORE
from fivefold.data.examples import ANSWERED, ASKED, Document, Example, NumberedText, Preference, Rated, TokenIds
from fivefold.data.source import RECORD_KINDS, FileList, FilePart, Format, Source
from fivefold.data.spans import words
from fivefold.data.token_ids import BOUNDS, LISTS, documents_in, rows_are

_KEYS_SHOWN = 8
_KEY_SHOWN = 40  # characters
_REQUEST = {"messages", "tools", "parallel_tool_calls"}  # keys in an `input` of OpenAI's preference form
MOST_FORMS = 256  # most sets of keys per source whose meaning is cached
_MORE = "fivefold docs howto/data, 'Conversations and instructions'"
_YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

# Part of an example -> its column names in published data sets, in lower case, by priority.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "trajectory", "data"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "chosen": ("chosen", "chosen_response", "preferred", "preferred_output", "response_j"),
    "rejected": ("rejected", "rejected_response", "dispreferred", "non_preferred_output", "response_k"),
    "task": ("definition",),  # in front of the question
    "asked": ASKED,
    "input": ("input", "context"),  # after the question
    "answered": ANSWERED,
    "system": ("system", "system_prompt", "system_message"),
    "tools": ("tools", "functions"),
    "history": ("history",),
    "chat_template_kwargs": ("chat_template_kwargs",),
    "label": ("label", "kto_tag", "desirable"),  # true for a desirable answer
    "media": ("image", "images", "video", "videos", "audio", "audios"),
}
_BY_TEMPLATE = ("tools", "history", "chat_template_kwargs")  # parts that only a template can render
_BESIDE = ("system", *_BY_TEMPLATE)
_PAIR = ("chosen", "rejected")
# Two answers and their verdict column, in lower case -> verdicts for the first, for the second; any other verdict
# prefers neither.
_VERDICTS: Mapping[tuple[str, str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("response_0", "response_1", "better_response_id"): (("0",), ("1",)),
    ("response1", "response2", "overall_preference"): (("-3", "-2", "-1"), ("1", "2", "3")),
    ("conversation_a", "conversation_b", "winner"): (("model_a",), ("model_b",)),
}
# Columns of tokens, those of masks in which 0 is context (TRL's), and what else is beside tokens.
_IDS, _MASKS = ("input_ids", "tokens"), ("completion_mask", "assistant_masks")
_BESIDE_IDS = ("labels", "attention_mask", *_MASKS, *BOUNDS)
_WORKED = {"solution": "answer"}  # of two answers, the one with its working is trained


@dataclass(frozen=True)
class Form:
    """One form of records, recognised by the parts that it `needs`. `kinds`: its names in `format`. `asked`: the parts
    of the question, joined by newlines. `is_plain`: the answer continues the question's text, without a template."""

    name: str
    kinds: tuple[str, ...]
    needs: tuple[str, ...]
    asked: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    is_plain: bool = False

    def fits(self, found: Mapping[str, tuple[str, ...]]) -> bool:
        return all(found[part] for part in self.needs)


# If several fit: the one with most parts named in `columns`, then the first.
_FORMS = (
    Form("chat records", ("chat", "sharegpt"), ("messages",)),
    Form("instruction records", ("completion", "chat"), ("prompt", "completion"), ("prompt", "input"), ("completion",),
         is_plain=True),
    Form("preference records", ("preference", "chat"), (*_PAIR, "prompt"), ("prompt", "input"), _PAIR, is_plain=True),
    Form("preference records", ("preference", "chat"), (*_PAIR, "asked"), ("task", "asked", "input"), _PAIR),
    Form("preference records", ("preference", "chat"), (*_PAIR, "messages"), ("messages",), _PAIR),
    Form("preference records", ("preference",), _PAIR, ("input",), _PAIR, is_plain=True),
    Form("instruction records", ("chat", "alpaca", "completion"), ("asked", "answered"), ("task", "asked", "input"),
         ("answered",)),
)  # fmt: skip


@dataclass(frozen=True)
class Records(Format):
    """A format whose documents come from a field of records: the source's `text_key`."""

    noun: str = "key"  # the word for a field in messages

    def records(
        self, path: Path, source: Source, part: FilePart | None = None
    ) -> Generator[tuple[str, Mapping[str, object]]]:
        """The records of a part of a file; None: of all of it, at least one. Each is preceded by its place for
        messages."""
        raise NotImplementedError

    def documents(self, path: Path, source: Source) -> Iterator[Document]:
        return self._as_rows(self._documents(self.records(path, source), source), path, source)

    def documents_of(self, part: FilePart, path: Path, source: Source) -> Iterator[Document]:
        return self._as_rows(self._documents(self.records(path, source, part), source), path, source)

    def _as_rows(self, documents: Iterator[Document], path: Path, source: Source) -> Iterator[Document]:
        """The documents; rows of token ids are what the first ones of the file are: parts of a stream, or packed."""
        kind = ""
        for document in documents:
            if isinstance(document, TokenIds):
                if not kind:
                    notes = source.unread()
                    with closing(self.records(path, notes)) as records:
                        kind = rows_are(self._documents(records, notes))
                if kind != "documents":
                    document = replace(document, is_whole=False, is_packed=kind == "packed")
            yield document

    def _known(
        self, record: Mapping[str, object], source: Source, known: dict[tuple[str, ...], "RecordKeys | None"]
    ) -> "RecordKeys | None":
        """The parts of a record, cached for records with the same keys, also in `source.read`."""
        names = tuple(record)
        if names in known:
            return known[names]
        parts = parts_of(names, source)
        if len(known) < MOST_FORMS:
            known[names], source.read[names] = parts, parts.keys if parts else (source.text_key,)
        return parts

    def _documents(self, opened: Generator[tuple[str, Mapping[str, object]]], source: Source) -> Iterator[Document]:
        known: dict[tuple[str, ...], RecordKeys | None] = {}
        with closing(opened) as records:
            if source.rates:
                answers = (
                    rated_of(record, source, where, parts)
                    for where, record in records
                    if _is_decided(record, source, parts := self._known(record, source, known))
                )
                yield from examples.beside_others(answer for group in answers for answer in group)
                return
            whole: RecordKeys | None = None  # parts of the last record that was an example
            for where, record in records:
                parts = self._known(record, source, known)
                if parts is None and whole is not None:
                    _check_complete(record, whole, source, where, self.noun)
                whole = parts or whole
                if not _is_decided(record, source, parts):
                    continue
                if parts and parts.ids:
                    found: Iterable[Document] = ids_of(record, parts, where)
                else:
                    found = [example_of(record, source, where, parts) or text_of(record, source, where, self.noun)]
                for document in found:
                    yield _numbered(document, record, source, where) if source.numbers else document

    def options(self, source: Source) -> dict[str, str]:
        of_examples = {
            "format": source.format if source.format in RECORD_KINDS else "",
            "columns": "".join(f"{name}={key};" for name, key in sorted(source.columns.items())),
            "train_on": source.train_on if source.train_on != Source.train_on else "",
            "rates": "1" if source.rates else "",
            "pairs": "1" if source.pairs else "",
            "numbers": ",".join(source.numbers),
        }
        return {"text_key": source.text_key, **{name: value for name, value in of_examples.items() if value}}


# ---- the meaning of columns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordKeys:
    """The keys of a record that make an example of `form`. `beside`: keys of a system text, tools and the like."""

    form: Form
    turns: str | None = None
    asked: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    is_plain: bool = False
    beside: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    verdict: str | None = None  # the column with the better answer
    media: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()  # of token ids, and of what is said about them

    @property
    def keys(self) -> tuple[str, ...]:
        of_answers = (*self.answers, self.label, self.verdict)
        named = (self.turns, *self.asked, *of_answers, *self.beside.values(), *self.media, *self.ids)
        return tuple(key for key in named if key is not None)


def parts_of(names: Collection[str], source: Source) -> RecordKeys | None:
    """The keys that make an example of records with these `names`; None for texts and unknown records. Raises
    `UserError` if `source` names a missing key."""
    columns, kind = source.columns, source.format if source.format in RECORD_KINDS else None
    if source.text_key in _IDS and source.text_key in names and not (kind or columns or source.pairs):
        return _parts_of_ids(names, source.text_key, source)
    if kind is None and not columns and source.text_key in names and not source.pairs:
        return None
    for part, key in columns.items():
        if key not in names and part not in (*_BESIDE, "input"):  # optional parts
            raise UserError(
                f"{source.label}.columns.{part}: no record has {key!r}; they have {_listed(names)}",
                fix=f"name one of them, or leave {source.label}.columns out",
            )
    found = _found(names, columns)
    several = {"answered"} if len(found["answered"]) > 1 else set()  # ambiguous
    fitting = [form for form in _FORMS if form.fits(found) and (kind or form.kinds[0]) in form.kinds]
    fitting = [form for form in fitting if several.isdisjoint(form.needs)]
    of_pairs = [form for form in fitting if source.pairs and form.answers == _PAIR]
    if kind is None and not columns and source.text_key in names and not of_pairs:
        return None
    named = {*columns, *(_BROAD[part] for part in columns if part in _BROAD)}
    form = max(of_pairs or fitting, key=lambda form: len(named.intersection(form.needs)), default=None)
    if form is None:
        has_ids = _IDS[0] in names and source.text_key not in names and not (kind or columns or source.pairs)
        return _parts_of_ids(names, _IDS[0], source) if has_ids else None
    if source.train_on != Source.train_on and (source.rates or form.answers == _PAIR):
        raise UserError(
            f"{source.label}.train_on: {source.train_on}: of preference records the answers are trained alone",
            fix=f"leave {source.label}.train_on out",
        )
    is_turns = any(found[part] for part in _BY_TEMPLATE) or kind in ("chat", "alpaca")
    is_plain = kind == "completion" or (form.is_plain and not is_turns)
    return RecordKeys(
        form,
        turns=None if form.answers else found["messages"][0],
        asked=tuple(dict.fromkeys(key for part in form.asked for key in found[part])),
        answers=tuple(found[part][0] for part in form.answers),
        is_plain=is_plain,
        beside={part: found[part][0] for part in _BESIDE if found[part] and not (is_plain and part in _BY_TEMPLATE)},
        label=found["label"][0] if source.rates and found["label"] else None,
        verdict=found["verdict"][0] if form.answers == _PAIR and found["verdict"] else None,
        media=found["media"],
    )


def _parts_of_ids(names: Collection[str], key: str, source: Source) -> RecordKeys:
    if source.train_on != Source.train_on:
        raise UserError(
            f"{source.named('train_on')}: {source.train_on}: of token ids, 'labels' say what is trained",
            fix=f"leave {source.named('train_on')} out",
        )
    return RecordKeys(Form("token ids", ("",), ()), ids=(key, *(name for name in _BESIDE_IDS if name in names)))


_BROAD = {"prompt": "asked", "completion": "answered"}  # a name in `columns` replaces all columns like it


def _found(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Each part -> its keys: from `columns`, else by their names."""
    names = list(names)
    by_name = {name.lower(): name for name in reversed(names)}
    found = {part: tuple(by_name[name] for name in known if name in by_name) for part, known in _NAMES.items()}
    short = [_WORKED.get(key.lower()) for key in found["answered"]]
    found["answered"] = tuple(key for key in found["answered"] if key.lower() not in short)
    found["verdict"] = ()
    is_said = any(found[part] or part in columns for part in _PAIR)
    for keys in _VERDICTS if not is_said else ():
        if all(name in by_name for name in keys):
            found |= {part: (by_name[name],) for part, name in zip((*_PAIR, "verdict"), keys, strict=True)}
    if "prompt" in columns:
        found |= {"task": (), "input": ()}
    for part, key in columns.items():
        found |= {role: (key,) if key in names else () for role in (part, _BROAD.get(part, part))}
    return found


def _better(record: Mapping[str, object], parts: RecordKeys) -> int | None:
    """The better of the two answers, 0 or 1; None if neither is."""
    assert parts.verdict is not None
    said = str(record[parts.verdict]).strip().lower().removesuffix(".0")
    verdicts = _VERDICTS[parts.answers[0].lower(), parts.answers[1].lower(), parts.verdict.lower()]
    return next((number for number, synonyms in enumerate(verdicts) if said in synonyms), None)


def _is_decided(record: Mapping[str, object], source: Source, parts: RecordKeys | None) -> bool:
    """True if a record is trained; a record that prefers neither answer is counted."""
    if parts is None or parts.verdict is None or _better(record, parts) is not None:
        return True
    source.undecided[parts.verdict] += 1
    return False


# ---- documents -------------------------------------------------------------------------------------------------------


def example_of(
    record: Mapping[str, object], source: Source, where: str, parts: RecordKeys | None = None
) -> Example | Preference | None:
    """The example, or the pair of two, in a record; None for a text. Raises `UserError`, naming the place."""
    parts = parts or parts_of(record, source)
    if parts is None:
        if source.format in RECORD_KINDS:
            raise UserError(
                f"{where}: no {source.format} record; the keys are {_listed(record)}", fix=_columns(source), more=_MORE
            )
        return None
    if media := next((key for key in parts.media if record[key]), None):
        raise UserError(f"{where}: {media!r} is given, and the model reads text alone", fix="leave such records out")
    beside = {part: record.get(key) for part, key in parts.beside.items()}
    if parts.turns:
        example = examples.chat(where, record[parts.turns], train_on=source.train_on, **beside)
        if beside.get("system") and words(example.turns[0]) != beside["system"]:  # a turn contains another system text
            source.read[tuple(record)] = tuple(key for key in parts.keys if key != parts.beside["system"])
        return example
    asked = _question(record, parts, where)
    if isinstance(asked, Mapping) and "messages" in asked and asked.keys() <= _REQUEST:
        asked, beside = asked["messages"], {"tools": asked.get("tools"), **beside}
    answers = parts.answers[::-1] if parts.verdict and _better(record, parts) else parts.answers
    found = examples.answered(
        where, asked, [record[key] for key in answers], by_template=not parts.is_plain, train_on=source.train_on,
        **beside,
    )  # fmt: skip
    return Preference(found[0], found[1]) if len(found) == 2 else found[0]


def ids_of(record: Mapping[str, object], parts: RecordKeys, where: str) -> Iterator[TokenIds]:
    """The documents of token ids in a record: one, or those of a packed row (`data.token_ids`).

    `labels` are the ids, with -100 in place of those that are not trained, nor are those with 0 in a mask of `_MASKS`;
    tokens whose `attention_mask` is 0 are padding. Raises `UserError`, naming the place."""
    key = parts.ids[0]
    ids = _integers(record.get(key), where, key)
    beside = {name: _integers(record[name], where, name) for name in parts.ids[1:] if record.get(name) is not None}
    for name, values in beside.items():
        if len(values) != len(ids) and BOUNDS.get(name) not in LISTS:
            raise UserError(f"{where}: {len(ids):,} {key}, and {len(values):,} {name}", fix="write one for each token")
    labels = beside.get("labels")
    for of_answers in (beside[name] for name in _MASKS if name in beside):
        labels = np.where(of_answers != 0, ids if labels is None else labels, IGNORE)
    trained = None if labels is None else _trained(ids, labels, where)
    places, is_packed = documents_in(beside, len(ids), where)
    for at, place in places:
        marks = None if trained is None else trained[place]
        yield TokenIds(at, ids[place], marks, is_whole=marks is None and not is_packed, is_packed=is_packed)


def _trained(ids: NDArray[np.integer], labels: NDArray[np.integer], where: str) -> NDArray[np.bool_]:
    """A mask of the tokens that `labels` train. Raises `UserError` where these are not the ids themselves."""
    trained = labels != IGNORE
    if (wrong := trained & (labels != ids)).any():
        at = int(wrong.argmax())
        is_shifted = bool((~trained | (labels == np.roll(ids, -1)))[:-1].all())
        raise UserError(
            f"{where}: label {at + 1:,} is {int(labels[at])}, and the token there {int(ids[at])}"
            + "; the labels are shifted by one" * is_shifted,
            fix="write in labels the ids of the tokens themselves, and -100 for those that are not trained",
        )
    return np.asarray(trained)


def _integers(values: object, where: str, key: str) -> NDArray[np.integer]:
    """The integers of a list, or of an array."""
    if isinstance(values, list | tuple | np.ndarray):
        with suppress(ValueError):  # lists of different lengths
            array = np.asarray(values) if len(values) else np.empty(0, np.int64)
            if array.ndim == 1 and array.dtype.kind in "iu":
                return array
    raise UserError(f"{where}: {key!r} holds {examples.kind_of(values)}, not a list of integers", fix="write token ids")


def _question(record: Mapping[str, object], parts: RecordKeys, where: str) -> object:
    """The question: its distinct texts joined by newlines, or its turns; None for two answers without a question. A
    `prompt` that contains all other texts stands alone, unless it ends with the answer."""
    given = [record[key] for key in parts.asked if record[key] not in (None, "")]
    if len(given) == 1 and isinstance(given[0], str | list | tuple | Mapping):
        return given[0]
    for value in given:
        if not isinstance(value, str):
            raise UserError(f"{where}: what is asked is {examples.kind_of(value)}, not a string", fix="write a string")
    if not given and len(parts.answers) == 2 and "" not in map(record.get, parts.asked):
        return None
    texts = list(dict.fromkeys(map(str, given)))
    whole = record[parts.asked[0]] if parts.asked and parts.asked[0].lower() == "prompt" else None
    if isinstance(whole, str) and len(texts) > 1 and all(text in whole for text in texts):
        answer = str(record[parts.answers[0]]).strip()
        has_answer = bool(answer) and not parts.is_plain and whole.rstrip().endswith(answer)
        texts = texts[1:] if has_answer else [whole]
    return "\n".join(texts)


def rated_of(
    record: Mapping[str, object], source: Source, where: str, parts: RecordKeys | None = None
) -> Iterator[Rated]:
    """The rated answer in a record, or the two of a pair. Raises `UserError`, naming the place."""
    found = example_of(record, source, where, parts)
    if isinstance(found, Preference):
        yield from (Rated(found.first, desirable=True), Rated(found.second, desirable=False))
        return
    key = parts.label if parts else None
    rating = record[key] if key else None
    desirable = rating if isinstance(rating, bool) else _YES_OR_NO.get(str(rating).lower())
    if parts is None or found is None or desirable is None:
        said = f"{key!r} is {rating!r}, not true or false" if key else "no rated answer"
        raise UserError(
            f"{where}: {said}; the keys are {_listed(record)}",
            fix=f"name a prompt, an answer and whether it is desirable, {source.label}.columns: {{prompt: KEY, "
            "completion: KEY, label: KEY}",
            more="fivefold docs howto/preferences",
        )
    if found.turns and not (parts.answers and isinstance(record[parts.answers[0]], list)):
        found = replace(found, context=len(found.turns) - 1)
    yield Rated(found, desirable)


def _check_complete(record: Mapping[str, object], whole: RecordKeys, source: Source, where: str, noun: str) -> None:
    """Raise `UserError` for a record that is no text and lacks keys of the earlier example with `whole`."""
    missing = [key for key in whole.keys if key not in record]
    if missing and source.text_key not in record:
        raise UserError(
            f"{where}: no {noun} {_listed(missing)}, which records before it have",
            fix="complete this record, or take it out",
            more=_MORE,
        )


def text_of(record: Mapping[str, object], source: Source, where: str, noun: str) -> str:
    """The string under the source's `text_key`. Raises `UserError`, naming the place and the existing keys."""
    text = record.get(source.text_key)
    if not isinstance(text, str):
        kind = examples.kind_of(text) if source.text_key in record else None
        raise no_text(record, source, where, kind=kind, likely=_longest(record), noun=noun)
    return examples.encodable(text, where)


def _numbered(document: Document, record: Mapping[str, object], source: Source, where: str) -> Document:
    """The document with the numbers of its record. Raises `UserError`, naming the place."""
    values = [record.get(key) for key in source.numbers]
    for key, value in zip(source.numbers, values, strict=True):
        if not isinstance(value, int | float) or not isfinite(value):
            said = f"{key} is {value!r}" if key in record else f"no {key}; the keys are {_listed(record)}"
            raise UserError(
                f"{where}: {said}, and objective.columns names it as a number",
                fix=f"write a number there, or leave {key} out of objective.columns",
                more="fivefold docs howto/losses",
            )
    numbers = tuple(float(value) for value in values if isinstance(value, int | float))
    if isinstance(document, Example | TokenIds):
        return replace(document, numbers=numbers)
    assert isinstance(document, str), "pairs of answers have objectives of their own"
    text = NumberedText(document)
    text.numbers = numbers
    return text


def keys_read(names: Sequence[str], source: Source, of_document: Sequence[str]) -> list[str]:
    """The columns of a table that are read: those of the document, and the numbers of its record."""
    return [key for key in dict.fromkeys((*of_document, *source.numbers)) if key in names]


def given(value: Any) -> Any:
    """`value` without the null keys inside: in tables, each object has the keys of all others."""
    if isinstance(value, dict):
        return {key: given(item) for key, item in value.items() if item is not None}
    return [given(entry) for entry in value] if isinstance(value, list) else value


def check_columns(files: FileList) -> None:
    """Raise `UserError` if a loss of the user's own reads numbers of records, and a file of the source has no records.
    A token store has those it was made with."""
    source = files.source
    plain = [path for path, form in files.files if not (isinstance(form, Records) or form.holds_tokens)]
    if source.numbers and plain:
        raise UserError(
            f"objective.columns names numbers of records, and {source.label}: {plain[0]} has none",
            fix="name records: jsonl, csv or parquet; or leave objective.columns out",
            more="fivefold docs howto/losses",
        )


def check_plain(files: FileList) -> None:
    """Raise `UserError` for record settings on a source whose files have no records."""
    source, plain = files.source, Source("", "")
    for setting in ("columns", "text_key", "train_on"):
        if getattr(source, setting) != getattr(plain, setting):
            raise UserError(
                f"{source.named(setting)} is of records, and {files.name} has none",
                fix=f"leave {source.named(setting)} out",
            )


def check_used(source: Source, *, are_examples: bool) -> None:
    """Raise `UserError` for record settings of `source` that none of the records read uses."""
    names = dict.fromkeys(name for names in source.read for name in names)
    keys = {f"columns.{part}": key for part, key in source.columns.items()}
    keys |= {"text_key": source.text_key} if source.text_key != Source.text_key else {}
    for setting, key in keys.items():
        if key not in names and len(source.read) < MOST_FORMS:
            raise UserError(
                f"{source.named(setting)}: no record has {key!r}; they have {_listed(names)}",
                fix=f"name one of them, or leave {source.named(setting)} out",
            )
    if source.train_on != Source.train_on and not are_examples:
        raise UserError(
            f"{source.named('train_on')}: {source.train_on}: the records are texts, all of which is trained",
            fix=f"leave {source.named('train_on')} out, or say which keys are asked and answered: "
            f"{source.label}.columns",
            more=_MORE,
        )


# ---- messages about records ------------------------------------------------------------------------------------------


def conversation_of(names: Collection[str]) -> tuple[Form, tuple[str, ...]] | None:
    """The form of chat, preference or instruction records with these keys, and the keys that identify it."""
    found = _found(names, {})
    form = next((form for form in _FORMS if form.fits(found)), None)
    keys = {key for part in (*form.needs, *form.asked, *_BESIDE) for key in found[part]} if form else ()
    return (form, tuple(name for name in names if name in keys)) if form else None


def columns_read(files: FileList, by_template: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    """The report on the columns of files that were read: a line about the unused ones, including keys of turns not used
    `by_template`, and a warning for each kind of record read as a text with one side only."""
    read, key = files.source.read, files.source.text_key
    used = dict.fromkeys(name for names in read.values() for name in names)
    numbers = files.source.numbers
    unused = dict.fromkeys(name for names, keys in read.items() for name in names if name not in (*keys, *numbers))
    warnings, instead = {}, ""
    for names in (names for names, keys in read.items() if keys == (key,)):
        if conversation := conversation_of(names):
            form, keys = conversation
            others = tuple(name for name in keys if name != key)
            instead = f" as a text; {_listed(others)} by format: {form.kinds[0]}"
            if key in keys and key != Source.text_key:
                warnings[form.name, others] = (
                    f"{files.name} holds {form.name}, and {key!r} alone is trained on; "
                    f"{_listed(others)} {'is' if len(others) == 1 else 'are'} left out"
                )
    said = [f"{_listed(used, 99)} read{instead}"] + [f"left out: {_listed(unused, 99)}"] * bool(unused)
    said += [
        f"{many(count, 'record')} left out: {key!r} prefers neither answer"
        for key, count in files.source.undecided.items()
    ]
    said += [f"left out of turns by the template: {', '.join(by_template)}"] * bool(by_template)
    return f"{files.name}: {'; '.join(said)}" if len(said) > 1 else "", tuple(warnings.values())


def no_text(
    names: Iterable[str], source: Source, where: str, *, kind: str | None = None, likely: str | None, noun: str
) -> UserError:
    """The error that `text_key` is none of `names`, or holds `kind`, which is no string; `likely`: the probable key."""
    names = list(names)
    if conversation := conversation_of(names):
        # No key is advised: any of them would train on the answers, or the prompts, alone.
        return UserError(
            f"{where}: these are {conversation[0].name} ({_listed(conversation[1])}), and which keys are asked and "
            "answered is not to be told",
            fix=_columns(source),
            more=_MORE,
        )
    if kind is not None:
        return UserError(
            f"{where}: {source.text_key!r} holds {kind}, not a string", fix=_fix(source, likely, noun, names)
        )
    return UserError(
        f"{where}: no {noun} {source.text_key!r}; the {noun}s are {_listed(names)}",
        fix=_fix(source, None if _found(names, {})["asked"] else likely, noun, names),
        more=f"or name the files with a glob, such as {source.path}/*.txt" if Path(source.path).is_dir() else None,
    )


def _columns(source: Source) -> str:
    return (
        f"name them, {source.label}.columns: {{prompt: KEY, completion: KEY}}, or {{messages: KEY}} for a list of turns"
    )


def _fix(source: Source, likely: str | None, noun: str, names: Collection[str]) -> str:
    """The advice as it would be typed, if one key looks like the text."""
    if likely is None:
        of_two = f"; where one asks and another answers, {_columns(source)}" if len(names) > 1 else ""
        return f"{source.named('text_key')} names the {noun} that holds the text{of_two}"
    return f"add {source.option('text_key', likely)}"


def _listed(names: Collection[str], most: int = _KEYS_SHOWN) -> str:
    shown = [repr(name if len(name) <= _KEY_SHOWN else f"{name[:_KEY_SHOWN]}...") for name in names][:most]
    return ", ".join(shown + ["..."] * (len(names) > most)) or "none at all"


def _longest(record: Mapping[str, object]) -> str | None:
    texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
    return max(texts, key=lambda name: texts[name], default=None)
