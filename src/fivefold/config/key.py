"""The keys of a run file as a person sees them, from the types and descriptions of its sections. No torch.

A key, or a value of one, is listed when it works: `core.legality.NOT_BUILT` names what is read and not done yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fivefold.core.legality import NOT_BUILT


@dataclass(frozen=True)
class Key:
    """One key of the run file: dotted name, default, what it means with its unit, and what may be chosen.

    `choices` are empty where any number or text may be given.
    """

    name: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()

    @property
    def section(self) -> str:
        return self.name.split(".")[0]

    @property
    def last(self) -> str:
        return self.name.split(".")[-1]


def keys_of(config: type[BaseModel]) -> Iterator[Key]:
    """Every key that works, in the order of the file; `config` has a field for each section."""
    return (key for name, field in _fields(config) if (key := _key(name, field)) is not None)


def _fields(config: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Every field of every section by its dotted name; those of a list's items after the list."""
    for section_name, section in config.model_fields.items():
        name = section.alias or section_name
        for key, field in type(section.default).model_fields.items():
            yield f"{name}.{field.alias or key}", field
            default = field.get_default()
            if isinstance(default, tuple) and default and isinstance(default[0], BaseModel):
                for inner, of_item in type(default[0]).model_fields.items():
                    yield f"{name}.{key}[].{inner}", of_item


def built(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of a key's values that work."""
    absent, _ = NOT_BUILT.get(name, ((), ""))
    return tuple(value for value in values if value not in absent)


def _key(name: str, field: FieldInfo) -> Key | None:
    """None for a key of which only the default is built."""
    choices = built(name, _choices(field))
    if name in NOT_BUILT and len(choices) == 1:
        return None
    default = None if field.is_required() else field.get_default()
    is_switch = set(choices) == {True, False}
    return Key(name, default, field.description or "", () if is_switch else choices)


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(extra.get("enum"), list):
        return tuple(extra["enum"])  # type: ignore[arg-type]
    return _values(field.annotation)


def _values(annotation: Any) -> tuple[Any, ...]:
    """The values that a type names (`Literal`, bool, unions and tuples of them); `a number` for a union's rest."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return (True, False)
    inner = [each for each in get_args(annotation) if each not in (NoneType, Ellipsis)]
    named = [_values(each) for each in inner]
    if not any(named):
        return ()
    return tuple(value for values in named for value in (values or ("a number",)))
