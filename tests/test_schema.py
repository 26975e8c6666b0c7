"""`fivefold train --schema`: what it accepts is what `load_config` accepts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold import cli
from fivefold.config import DEMO, RunConfig, load_config
from fivefold.config.key import json_schema_of
from fivefold.core.errors import UserError

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NOTES = re.search(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def accepts(rule: dict[str, Any], value: Any, whole: dict[str, Any]) -> bool:
    """Whether `value` fits: the part of JSON schema that ours is made of."""
    if "$ref" in rule:
        return accepts(whole["$defs"][rule["$ref"].rpartition("/")[2]], value, whole)
    if "anyOf" in rule and not any(accepts(each, value, whole) for each in rule["anyOf"]):
        return False
    kinds = [rule["type"]] if isinstance(rule.get("type"), str) else rule.get("type", [])
    if kinds and not any(value is None if kind == "null" else fits(kind, value) for kind in kinds):
        return False
    if ("enum" in rule and value not in rule["enum"]) or ("const" in rule and value != rule["const"]):
        return False
    if isinstance(value, str) and "pattern" in rule:
        return re.search(rule["pattern"], value) is not None
    if isinstance(value, int | float) and not rule.get("minimum", value) <= value < rule.get("exclusiveMaximum", 1e99):
        return False
    if isinstance(value, dict):
        known = rule.get("properties", {})
        free = rule.get("additionalProperties", True)
        return all(accepts(known[key], each, whole) if key in known else free for key, each in value.items())
    if isinstance(value, list):
        rules = rule.get("prefixItems", [rule.get("items", {})] * len(value))
        return len(rules) == len(value) and all(map(lambda r, v: accepts(r, v, whole), rules, value))
    return True


def fits(kind: str, value: Any) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def is_valid(text: str) -> bool:
    """By the package `jsonschema` too, where it is installed."""
    tree, rules = yaml.safe_load(text), json_schema_of(RunConfig)
    valid = accepts(rules, tree, rules)
    try:
        import jsonschema
    except ImportError:
        return valid
    jsonschema.Draft202012Validator.check_schema(rules)
    assert jsonschema.Draft202012Validator(rules).is_valid(tree) is valid
    return valid


def test_it_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--schema"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == json_schema_of(RunConfig)


@pytest.mark.parametrize(
    "text",
    [
        NOTES[1] if NOTES else "",
        DEMO.read_text(encoding="utf-8"),
        load_config(None).to_yaml(),
        "data: {seq_length: 8k, train: [a.txt, {path: b.jsonl, weight: 2}], validation: 1%}",
        "data: {train: {path: a.txt}, validation: [held.txt]}\nrun: {name: 5}",
        "optimizer: {learning_rate: 1e-4, betas: [0.9, 9.5e-1], ns_steps: null}",
        "train: {max_tokens: 500M, compile: true}\nlayout: shard2.tp2",
        "balance: {aux_loss: auto}\nlog: {to: [jsonl, wandb]}\nmodel: {overrides: {a: [1]}}",
    ],
)
def test_what_the_file_accepts(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    load_config(file)
    assert is_valid(text)


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lr: 3}", "optimzer: {}", "train: {seed: -1}", "train: {max_steps: 0}", "scheduler: {name: cos}",
        "data: {seq_length: long}", "train:", "optimizer: {betas: [0.9, 1.5]}", "log: {to: [paper]}",
        "data: {packing: 3}", "layout: {pp_schedule: 2f2b}", "data: {train: [{weight: 2}, 3, [a]]}",
    ],
)  # fmt: skip
def test_what_it_refuses_the_file_refuses_too(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        load_config(file)
    assert not is_valid(text)


@pytest.mark.parametrize("text", ["precision: {fp8: float8}", "memory: {recompute: 12 MB}"])
def test_values_that_are_none_are_not_in_it(text: str) -> None:
    assert not is_valid(text)
