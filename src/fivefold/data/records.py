"""The document of a record, a JSON object or a row of a table: a text, or an example of a conversation, or of a prompt
with its answer."""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data import examples
from fivefold.data.examples import Document, Example, Preference, Rated
from fivefold.data.source import RECORD_KINDS, FileList, Format, Source

_KEYS_SHOWN = 8
_KEY_SHOWN = 40  # characters

# Chat: a list of turns under one of these. ShareGPT has `conversations` with from/value, OpenAI's form is `messages`.
_TURNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns")
# What is asked, and what is answered: Alpaca, Dolly, prompt/completion, question/answer, FLAN.
_ASKED = (
    "prompt", "instruction", "instructions", "question", "query", "problem", "input", "inputs", "user", "human",
)  # fmt: skip
_ANSWERED = (
    "completion", "output", "outputs", "response", "answer", "answers", "solution", "target", "targets", "reply",
    "generation", "demonstration", "assistant",
)  # fmt: skip
_PREFERRED = ("chosen", "rejected")
_LABELS = ("label", "kto_tag", "desirable")  # whether an answer is desirable
_YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_ALSO_ASKED = (*_ASKED, "system", "context", "history")

# Standard names of the parts of an example -> what they are called.
_PARTS = {
    "messages": _TURNS, "prompt": ("prompt",), "completion": ("completion",), "system": ("system",),
    "tools": ("tools",), "chosen": ("chosen",), "rejected": ("rejected",), "label": _LABELS,
}  # fmt: skip

_MORE = "docs/data.md, 'Conversations and instructions'"


@dataclass(frozen=True)
class Records(Format):
    """A format whose documents are a field of records: the one that the source's `text_key` names."""

    noun: str = "key"  # what messages call a field

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        """Every record of a file, one at least, after what messages call its place."""
        raise NotImplementedError

    def documents(self, path: Path, source: Source) -> Iterator[Document]:
        with closing(self.records(path, source)) as records:
            if source.rates:
                yield from examples.beside_others(
                    each for where, record in records for each in rated_of(record, source, where)
                )
                return
            whole: Mapping[str, object] | None = None  # the last record that was an example
            for where, record in records:
                found = example_of(record, source, where)
                if found is None and whole is not None:
                    _check_complete(record, whole, source, where, self.noun)
                whole = record if found else whole
                yield found or text_of(record, source, where, self.noun)

    def columns(self, path: Path, source: Source) -> tuple[str, ...]:
        """The keys of the first record of a file."""
        with closing(self.records(path, source)) as records:
            return tuple(next(records)[1])

    def options(self, source: Source) -> dict[str, str]:
        of_examples = {
            "format": source.format if source.format in RECORD_KINDS else "",
            "columns": "".join(f"{name}={key};" for name, key in sorted(source.columns.items())),
            "train_on": source.train_on if source.train_on != Source.train_on else "",
            "rates": "1" if source.rates else "",
        }
        return {"text_key": source.text_key, **{name: value for name, value in of_examples.items() if value}}


@dataclass(frozen=True)
class Conversation:
    """What records of prompts and answers are called, and which of their keys say so."""

    name: str
    keys: tuple[str, ...]


def conversation_of(names: Collection[str]) -> Conversation | None:
    """Whether records of these keys are chat, preference or instruction data rather than texts."""
    turns, asked, answered, preferred = (
        tuple(name for name in names if name.lower() in keys) for keys in (_TURNS, _ALSO_ASKED, _ANSWERED, _PREFERRED)
    )
    if turns:
        return Conversation("chat records", turns)
    if len(preferred) == len(_PREFERRED):
        return Conversation("preference records", (*asked, *preferred))
    if answered and _asks(asked):
        return Conversation("instruction records", (*asked, *answered))
    return None


@dataclass(frozen=True)
class Parts:
    """The keys of a record that make an example. `turns`: a list of turns; `asked`, `answered`: what is asked, in the
    order in which it is put together, and the answer. `is_plain`: the two are one text, and no template is used.
    `preferred`: the keys of a chosen and of a rejected answer, in place of one answer. `label`: whether an answer is
    desirable, where that is asked for."""

    turns: str | None = None
    asked: tuple[str, ...] = ()
    answered: str | None = None
    is_plain: bool = False
    system: str | None = None
    tools: str | None = None
    history: str | None = None
    preferred: tuple[str, ...] = ()
    label: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them."""
        named = (
            self.turns,
            *self.asked,
            self.answered,
            *self.preferred,
            self.system,
            self.tools,
            self.history,
            self.label,
        )
        return tuple(key for key in named if key is not None)


def parts_of(names: Collection[str], source: Source) -> Parts | None:
    """Which keys make an example of records with these `names`; None where they are texts, or nothing known. Raises
    `UserError` where `source` names a key that is not there."""
    parts = _parts_of(names, source)
    if parts is None or not source.rates:
        return parts
    return replace(parts, label=source.columns.get("label") or _first(names, _LABELS))


def _parts_of(names: Collection[str], source: Source) -> Parts | None:
    columns, kind = source.columns, source.format if source.format in RECORD_KINDS else None
    if kind is None and not columns and source.text_key in names:
        return None
    for name, key in columns.items():
        if key not in names and name not in ("system", "tools"):  # which a record may be without
            raise UserError(
                f"{source.label}.columns.{name}: no record has {key!r}; they have {_listed(names)}",
                fix=f"name one of them, or leave {source.label}.columns out",
            )
    named = {part: columns.get(part) or _first(names, known) for part, known in _PARTS.items()}
    system, tools, prompt, answer = (named[part] for part in ("system", "tools", "prompt", "completion"))
    if preferred := _preferred(named, columns, kind):
        first = [prompt] if prompt else [found for name in _ASKED if (found := _first(names, (name,)))][:1]
        return Parts(asked=tuple(first), preferred=preferred, is_plain=bool(prompt), system=system, tools=tools)
    if kind == "preference":
        return None
    if named["messages"] and kind != "completion" and "prompt" not in columns:
        return Parts(turns=named["messages"], system=system, tools=tools)
    if prompt and answer:
        return Parts(asked=(prompt,), answered=answer, is_plain=kind != "chat", system=system, tools=tools)
    asked = tuple(found for name in (*_ASKED, "context") if (found := _first(names, (name,))))
    answered = [found for name in _ANSWERED if (found := _first(names, (name,)))]
    if not _asks(asked) or len(answered) != 1 or all(_first(names, (name,)) for name in _PREFERRED):
        return None
    return Parts(
        asked=asked, answered=answered[0], is_plain=kind == "completion", system=system, tools=tools,
        history=_first(names, ("history",)),
    )  # fmt: skip


def _preferred(named: Mapping[str, str | None], columns: Mapping[str, str], kind: str | None) -> tuple[str, ...]:
    """The keys of a chosen and of a rejected answer, where records are such pairs: by `kind`, by `columns`, or because
    they have both keys, and nothing says that they are something else."""
    chosen, rejected = named["chosen"], named["rejected"]
    if not chosen or not rejected:
        return ()
    is_asked = kind == "preference" or not set(_PREFERRED).isdisjoint(columns)
    is_other = kind is not None or named["messages"] or named["completion"]
    return (chosen, rejected) if is_asked or not is_other else ()


def _first(names: Iterable[str], known: Collection[str]) -> str | None:
    return next((name for name in names if name.lower() in known), None)


def example_of(record: Mapping[str, object], source: Source, where: str) -> Example | Preference | None:
    """The example, or the pair of two, that a record is; None for a text. Raises `UserError`, naming the place."""
    parts = parts_of(record, source)
    if parts is None:
        if source.format in RECORD_KINDS:
            raise UserError(
                f"{where}: no {source.format} record; the keys are {_listed(record)}",
                fix=_columns(source),
                more=_MORE,
            )
        return None
    system, tools = (record.get(key) if key else None for key in (parts.system, parts.tools))
    if parts.turns:
        return examples.chat(where, record[parts.turns], system=system, tools=tools, train_on=source.train_on)
    if parts.preferred:
        return _pair(record, parts, source, where, system=system, tools=tools)
    asked, answer = [record[key] for key in parts.asked], record[str(parts.answered)]
    if isinstance(answer, list):
        return examples.chat(where, answer, context=asked[0], system=system, tools=tools, train_on=source.train_on)
    if parts.is_plain:
        return examples.pair(where, "\n\n".join(_strings(asked, where)), answer, train_on=source.train_on)
    turns = [{"role": "user", "content": "\n\n".join(_strings(asked, where))}, {"role": "assistant", "content": answer}]
    before = examples.history(record[parts.history], where) if parts.history else []
    return examples.chat(where, [*before, *turns], system=system, tools=tools, train_on=source.train_on)


def rated_of(record: Mapping[str, object], source: Source, where: str) -> Iterator[Rated]:
    """The rated answer that a record is, or the two of a pair. Raises `UserError`, naming the place."""
    parts, found = parts_of(record, source), example_of(record, source, where)
    if isinstance(found, Preference):
        yield from (Rated(found.first, desirable=True), Rated(found.second, desirable=False))
        return
    rating = None if parts is None or parts.label is None else record[parts.label]
    desirable = rating if isinstance(rating, bool) else _YES_OR_NO.get(str(rating).lower())
    if parts is None or found is None or desirable is None:
        key = parts.label if parts else None
        said = f"{key!r} is {rating!r}, not true or false" if key else "no rated answer"
        raise UserError(
            f"{where}: {said}; the keys are {_listed(record)}",
            fix=f"name a prompt, an answer and whether it is desirable, {source.label}.columns: {{prompt: KEY, "
            "completion: KEY, label: KEY}",
            more="docs/preferences.md",
        )
    if source.train_on != Source.train_on:
        raise _answers_alone_are_trained(source)
    is_list = parts.answered is not None and isinstance(record[parts.answered], list)
    if found.turns and not is_list:
        found = replace(found, context=len(found.turns) - 1)
    yield Rated(found, desirable)


def _answers_alone_are_trained(source: Source) -> UserError:
    return UserError(
        f"{source.label}.train_on: {source.train_on}: of preference records the answers are trained alone",
        fix=f"leave {source.label}.train_on out",
    )


def _pair(
    record: Mapping[str, object], parts: Parts, source: Source, where: str, *, system: object, tools: object
) -> Preference:
    if source.train_on != Source.train_on:
        raise _answers_alone_are_trained(source)
    chosen, rejected = (record[key] for key in parts.preferred)
    asked = record[parts.asked[0]] if parts.asked else None
    return examples.preference(
        where, chosen, rejected, prompt=asked, system=system, tools=tools,
        by_template=bool(parts.asked) and not parts.is_plain,
    )  # fmt: skip


def _strings(values: Iterable[object], where: str) -> list[str]:
    """The texts that are not empty. Raises `UserError` for what is none."""
    found = [value for value in values if value is not None and value != ""]
    for value in found:
        if not isinstance(value, str):
            raise UserError(f"{where}: what is asked is {examples.kind_of(value)}, not a string", fix="write a string")
    return [str(value) for value in found]


def _asks(names: Iterable[str]) -> bool:
    return any(name.lower() in _ASKED for name in names)


def answers_alone(files: FileList) -> tuple[str, ...]:
    """What to say where `text_key` picks one side of a conversation: a line for each kind of record in the files."""
    key = files.source.text_key
    found = {}
    for path, form in files.files if key != Source.text_key else ():
        conversation = conversation_of(form.columns(path, files.source)) if isinstance(form, Records) else None
        if conversation and key in conversation.keys:
            others = tuple(name for name in conversation.keys if name != key)
            found[conversation.name, others] = (
                f"{files.name} holds {conversation.name}, and {key!r} alone is trained on; "
                f"{_listed(others)} {'is' if len(others) == 1 else 'are'} left out"
            )
    return tuple(found.values())


def _check_complete(
    record: Mapping[str, object], whole: Mapping[str, object], source: Source, where: str, noun: str
) -> None:
    """Raises `UserError` for a record that is neither a text nor, as `whole` before it, an example."""
    parts = parts_of(whole, source)
    missing = [key for key in (parts.keys if parts else ()) if key not in record]
    if missing and source.text_key not in record:
        raise UserError(
            f"{where}: no {noun} {_listed(missing)}, which records before it have",
            fix="complete this record, or take it out",
            more=_MORE,
        )


def text_of(record: Mapping[str, object], source: Source, where: str, noun: str) -> str:
    """The string under the source's `text_key`. Raises UserError, naming the place and the keys that there are."""
    text = record.get(source.text_key)
    if not isinstance(text, str):
        kind = examples.kind_of(text) if source.text_key in record else None
        raise no_text(record, source, where, kind=kind, likely=_longest(record), noun=noun)
    return examples.encodable(text, where)


def no_text(
    names: Iterable[str], source: Source, where: str, *, kind: str | None = None, likely: str | None, noun: str
) -> UserError:
    """That `text_key` is none of `names`, or holds `kind`, which is no string; `likely`: the one that may be meant."""
    names = list(names)
    if conversation := conversation_of(names):
        # No key is advised: any of them would train on the answers, or the prompts, alone.
        return UserError(
            f"{where}: these are {conversation.name} ({_listed(conversation.keys)}), and which keys are asked and "
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
        fix=_fix(source, None if _asks(names) else likely, noun, names),
        more=f"or name the files with a glob, such as {source.path}/*.txt" if Path(source.path).is_dir() else None,
    )


def _columns(source: Source) -> str:
    return (
        f"name them, {source.label}.columns: {{prompt: KEY, completion: KEY}}, or {{messages: KEY}} for a list of turns"
    )


def _fix(source: Source, likely: str | None, noun: str, names: Collection[str]) -> str:
    """As it would be typed, where one key looks like the text."""
    if likely is None:
        of_two = f"; where one asks and another answers, {_columns(source)}" if len(names) > 1 else ""
        return f"{source.named('text_key')} names the {noun} that holds the text{of_two}"
    return f"add {source.option('text_key', likely)}"


def _listed(names: Collection[str]) -> str:
    shown = [repr(name if len(name) <= _KEY_SHOWN else f"{name[:_KEY_SHOWN]}...") for name in names][:_KEYS_SHOWN]
    return ", ".join(shown + ["..."] * (len(names) > _KEYS_SHOWN)) or "none at all"


def _longest(record: Mapping[str, object]) -> str | None:
    """The key of the longest string."""
    texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
    return max(texts, key=lambda name: texts[name], default=None)
