"""The text of a record: a JSON object, or a row of a table."""

from collections.abc import Iterable, Mapping

from fivefold.data.source import Source
from fivefold.errors import UserError

_KEYS_SHOWN = 8


def text_of(record: Mapping[str, object], source: Source, where: str, noun: str = "key") -> str:
    """The string under the source's `text_key`. Raises UserError, naming the place and the keys that there are."""
    if source.text_key not in record:
        raise no_text(record, source, where, likely=_longest(record), noun=noun)
    text = record[source.text_key]
    if not isinstance(text, str):
        raise no_string(type(text).__name__, source, where, likely=_longest(record), noun=noun)
    return text


def no_text(names: Iterable[str], source: Source, where: str, *, likely: str | None, noun: str = "key") -> UserError:
    """That there is no `text_key` among `names`; `likely` is the one that is probably meant."""
    return UserError(
        f"{where}: no {noun} {source.text_key!r}; the {noun}s are {_listed(list(names))}",
        fix=_fix(source, likely, noun),
    )


def no_string(kind: str, source: Source, where: str, *, likely: str | None, noun: str = "key") -> UserError:
    """That what `text_key` names holds a `kind`."""
    return UserError(f"{where}: {source.text_key!r} holds a {kind}, not a string", fix=_fix(source, likely, noun))


def _fix(source: Source, likely: str | None, noun: str) -> str:
    """As it would be typed, where one key looks like the text."""
    if likely is None:
        return f"{source.label}.text_key names the {noun} that holds the text"
    return f"add {source.option('text_key', likely)}"


def _listed(names: list[str]) -> str:
    return ", ".join([repr(name) for name in names[:_KEYS_SHOWN]] + ["..."] * (len(names) > _KEYS_SHOWN)) or (
        "none at all"
    )


def _longest(record: Mapping[str, object]) -> str | None:
    """The key of the longest string."""
    texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
    return max(texts, key=lambda name: texts[name], default=None)
