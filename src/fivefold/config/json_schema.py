"""The JSON schema of a run file: what `load_config` accepts, for editors and for other programs. No torch."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from fivefold.config import RunConfig
from fivefold.config.key import built
from fivefold.core.legality import NOT_BUILT

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER = r"^\s*[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*[kKmMgGbB%]?\s*$"  # 8k, 500M, 1%, 1e-4
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}  # pydantic's words


class _AsWritten(GenerateJsonSchema):
    """A number may be written as text, as YAML reads `1e-4` and `8k`; a name may be written as a number."""

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return _or_text(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return _or_text(super().float_schema(schema))

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        return {**super().str_schema(schema), "type": ["string", "number"]}


def schema() -> dict[str, Any]:
    """The schema, in the dialect of 2020-12; values that are not built yet are not in it."""
    whole: dict[str, Any] = _tidy(RunConfig.model_json_schema(by_alias=True, schema_generator=_AsWritten))
    for section_name, section in RunConfig.model_fields.items():
        name = section.alias or section_name
        properties = whole["$defs"][type(section.default).__name__]["properties"]
        for key, values in properties.items():
            _leave_out_unbuilt(f"{name}.{key}", values)
        whole["properties"][name].pop("default", None)  # the defaults of its keys say it
    layout = whole["properties"]["layout"]
    whole["properties"]["layout"] = {"anyOf": [layout, {"type": "string"}], "description": "or a text: shard2.tp2"}
    return {"$schema": DIALECT, **whole, "title": "fivefold run file"}


def _tidy(node: Any) -> Any:
    """Without titles, and with the bounds of a number that may be text on the number."""
    if isinstance(node, list):
        return [_tidy(each) for each in node]
    if not isinstance(node, dict):
        return node
    tidy = {key: _tidy(value) for key, value in node.items() if key != "title" and key not in _BOUNDS}
    for bound in [each for each in _BOUNDS if each in node]:
        for each in tidy.get("anyOf", []):
            each |= {_BOUNDS[bound]: node[bound]} if each.get("type") in ("integer", "number") else {}
    return tidy


def _or_text(number: JsonSchemaValue) -> JsonSchemaValue:
    return {"anyOf": [number, {"type": "string", "pattern": _NUMBER}]}


def _leave_out_unbuilt(key: str, values: dict[str, Any]) -> None:
    if key in NOT_BUILT:
        values["enum"] = list(built(key, tuple(values.get("enum", (False, True)))))
