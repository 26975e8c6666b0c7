"""Parts of a `Layout`: how a feature declares its fields. No torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayoutKey:
    """Notation of a `Layout` field in the run file and in the text form. Everything else derives from this.

    `section`, `name`: its place in the run file. `file_default`: its default there. `choices`: its
    values; none: any number, or a text that its feature checks. `least`, `most`: of a number. `words`: options of the
    text form that are one bare word, and their values. `prefix`, `pattern`, `shown`: for an option with a value after
    its name, such as `zero1`; `shown` is that value in error messages. `text`: describes a value of the run file that
    `pattern` matches, besides the default and `words`. `is_last`: it comes at the end of the text form.

    Keys come in the order of the features; `after` is the field that this one follows instead. `file_after`: the same
    in its section of the run file alone. `peers`: names that other trainers have for it. `answers`: names without an
    exact counterpart, and what to write instead. `priced`: what of a rank it changes for the planner: its `work` in a
    micro batch, its `shards`, both, or neither.
    """

    help: str
    section: str
    name: str
    default: Any
    file_default: Any
    choices: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    pattern: str = r"[0-9]{1,9}"
    shown: str = "N"
    text: str = ""
    is_last: bool = False
    after: str = ""
    file_after: str = ""
    peers: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    priced: str = "work"

    @property
    def place(self) -> str:
        return f"{self.section}.{self.name}"


def key(default: Any, place: str, help: str, *, file_default: Any = None, **options: Any) -> Any:
    """Declare a field of `Layout`, at `place` in the run file, such as `layout.tp`."""
    section, name = place.split(".")
    in_file = default if file_default is None else file_default
    declared = LayoutKey(help=help, section=section, name=name, default=default, file_default=in_file, **options)
    return field(default=default, metadata={"key": declared})


def moved(names: Iterable[str], after: Callable[[str], str]) -> list[str]:
    """The names, each that has an `after` moved behind that one: `a b c` with c after a are `a c b`."""
    found = [*names]
    for name in found.copy():
        if first := after(name):
            found.remove(name)
            found.insert(found.index(first) + 1, name)
    return found


def bare(*values: str) -> dict[str, str]:
    return {value: value for value in values}


class LayoutPart:
    """One feature's part of `Layout`: a frozen dataclass of its keys, with what follows from them alone.

    `Layout` inherits from every part. A part defines those of the methods in `OF_PARTS` (`parallel/layout.py`) that it
    needs. `Layout` asks each part for its own, so none calls `super()`. A part that reads keys of other features
    inherits from their parts.
    """
