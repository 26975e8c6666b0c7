"""The text of a record: a JSON object, or a row of a table; and which records are prompts and answers instead."""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.source import FileList, Format, Source

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
_ALSO_ASKED = (*_ASKED, "system", "context", "history")

_RENDER = "render each record to one text with tokenizer.apply_chat_template(messages, tokenize=False), under the key"
_PLAIN = "fivefold trains plain text; docs/data.md, 'Conversations and instructions', shows how"


@dataclass(frozen=True)
class Records(Format):
    """A format whose documents are a field of records: the one that the source's `text_key` names."""

    noun: str = "key"  # what messages call a field

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        """Every record of a file, one at least, after what messages call its place."""
        raise NotImplementedError

    def documents(self, path: Path, source: Source) -> Iterator[str]:
        with closing(self.records(path, source)) as records:
            for where, record in records:
                yield text_of(record, source, where, self.noun)

    def columns(self, path: Path, source: Source) -> tuple[str, ...]:
        """The keys of the first record of a file."""
        with closing(self.records(path, source)) as records:
            return tuple(next(records)[1])

    def options(self, source: Source) -> dict[str, str]:
        return {"text_key": source.text_key}


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


def text_of(record: Mapping[str, object], source: Source, where: str, noun: str) -> str:
    """The string under the source's `text_key`. Raises UserError, naming the place and the keys that there are."""
    text = record.get(source.text_key)
    if not isinstance(text, str):
        kind = type(text).__name__ if source.text_key in record else None
        raise no_text(record, source, where, kind=kind, likely=_longest(record), noun=noun)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can say half a character
        raise UserError(
            f"{where}: half of a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}",
            fix="it stands for no character; remove it or write the file again from its origin",
        ) from error
    return text


def no_text(
    names: Iterable[str], source: Source, where: str, *, kind: str | None = None, likely: str | None, noun: str
) -> UserError:
    """That `text_key` is none of `names`, or holds a `kind` that is no string; `likely`: the one that may be meant."""
    names = list(names)
    if conversation := conversation_of(names):
        # No key is advised: any of them would train on the answers, or the prompts, alone.
        key = Source.text_key if source.text_key in conversation.keys else source.text_key
        found = f"{conversation.name} ({_listed(conversation.keys)})"
        return UserError(
            f"{where}: these are {found}, without a plain text under {key!r}", fix=f"{_RENDER} {key!r}", more=_PLAIN
        )
    if kind is not None:
        return UserError(f"{where}: {source.text_key!r} holds a {kind}, not a string", fix=_fix(source, likely, noun))
    return UserError(
        f"{where}: no {noun} {source.text_key!r}; the {noun}s are {_listed(names)}",
        fix=_fix(source, None if _asks(names) else likely, noun),
        more=f"or name the files with a glob, such as {source.path}/*.txt" if Path(source.path).is_dir() else None,
    )


def _fix(source: Source, likely: str | None, noun: str) -> str:
    """As it would be typed, where one key looks like the text."""
    if likely is None:
        return f"{source.label}.text_key names the {noun} that holds the text"
    return f"add {source.option('text_key', likely)}"


def _listed(names: Collection[str]) -> str:
    shown = [repr(name if len(name) <= _KEY_SHOWN else f"{name[:_KEY_SHOWN]}...") for name in names][:_KEYS_SHOWN]
    return ", ".join(shown + ["..."] * (len(names) > _KEYS_SHOWN)) or "none at all"


def _longest(record: Mapping[str, object]) -> str | None:
    """The key of the longest string."""
    texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
    return max(texts, key=lambda name: texts[name], default=None)
