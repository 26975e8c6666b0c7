"""The keys of a run file for people and editors, derived from the types and descriptions of its sections. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER = r"^\s*[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*[kKmMgGbB%]?\s*$"  # 8k, 500M, 1%, 1e-4
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}  # pydantic -> JSON


@dataclass(frozen=True)
class Key:
    """One key of the run file: dotted name, default, meaning with its unit, and choices.

    `choices` is empty if any number or text is allowed.
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
    """Yield every key in the order of the file; `config` has a field for each section."""
    return (_key(name, field) for name, field in _fields(config))


def _fields(config: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field of every section with its dotted name; those of a list's items follow the list, and those of a
    section inside a section stand in its place."""
    for section_name, section in config.model_fields.items():
        name = section.alias or section_name
        for key, field in type(section.default).model_fields.items():
            default = field.get_default()
            if isinstance(default, BaseModel):
                yield from (
                    (f"{name}.{key}.{inner}", of_inner) for inner, of_inner in type(default).model_fields.items()
                )
                continue
            yield f"{name}.{field.alias or key}", field
            for item in get_args(field.annotation):
                if isinstance(item, type) and issubclass(item, BaseModel):
                    yield from ((f"{name}.{key}[].{inner}", of_item) for inner, of_item in item.model_fields.items())


def _key(name: str, field: FieldInfo) -> Key:
    choices = _choices(field)
    default = None if field.is_required() else field.get_default()
    is_switch = set(choices) == {True, False}
    return Key(name, default, field.description or "", () if is_switch else choices)


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(extra.get("enum"), list):
        return tuple(extra["enum"])  # type: ignore[arg-type]
    return _values(field.annotation)


def _values(annotation: Any) -> tuple[Any, ...]:
    """The values that a type names (`Literal`, bool, unions and tuples of them). The other members of a union are in
    words: `a number`, or the description of the type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return (True, False)
    if get_origin(annotation) in (dict, Mapping):
        return ()  # its keys are not values
    inner = [kind for kind in get_args(annotation) if kind not in (NoneType, Ellipsis)]
    named = [_values(kind) for kind in inner]
    if not any(named):
        return ()
    return tuple(value for kind, values in zip(inner, named, strict=True) for value in (values or (_in_words(kind),)))


def _in_words(annotation: Any) -> str:
    told = (kind.description for kind in get_args(annotation) if isinstance(kind, FieldInfo))
    return next(filter(None, told), "a number")


# ---- the JSON schema -------------------------------------------------------------------------------------------------


class _AsWritten(GenerateJsonSchema):
    """Allows numbers as text, since YAML reads `1e-4` and `8k` as text, and names as numbers."""

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return _or_text(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return _or_text(super().float_schema(schema))

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        return {**super().str_schema(schema), "type": ["string", "number"]}


def json_schema_of(config: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the files that `load_config` accepts, for editors and for other programs."""
    whole: dict[str, Any] = _tidy(config.model_json_schema(by_alias=True, schema_generator=_AsWritten))
    for section_name, section in config.model_fields.items():
        whole["properties"][section.alias or section_name].pop("default", None)  # its keys have their own defaults
    layout = whole["properties"]["layout"]
    whole["properties"]["layout"] = {
        "anyOf": [layout, {"type": "string"}],
        "description": "or a text: shard2.tp2, or auto",
    }
    return {"$schema": DIALECT, **whole, "title": "fivefold run file"}


def _tidy(node: Any) -> Any:
    """Drop titles; for a number that may also be text, move its bounds to the number."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {key: _tidy(value) for key, value in node.items() if key != "title" and key not in _BOUNDS}
    for bound in [bound for bound in _BOUNDS if bound in node]:
        for option in tidy.get("anyOf", []):
            option |= {_BOUNDS[bound]: node[bound]} if option.get("type") in ("integer", "number") else {}
    return tidy


def _or_text(number: JsonSchemaValue) -> JsonSchemaValue:
    return {"anyOf": [number, {"type": "string", "pattern": _NUMBER}]}
