"""The datasets of axolotl."""

from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.convert.given import Given
from fivefold.convert.sources import PROPERTIES, ROLES, Source, at_its_paths, refuse_others

_TURNS = ("message_field_role", "message_field_content", "message_property_mappings", "roles", "chat_template")
_CHAT = (*_TURNS, "field_messages", "field_tools", "roles_to_train", "train_on_eos", "train_on_eot")
_PAIRS = (*_TURNS, "field_messages", "field_chosen", "field_rejected")


def sources(given: Given, held_out: bool) -> Iterator[Source]:
    """The sources of `datasets`, or of `test_datasets`."""
    key = "test_datasets" if held_out else "datasets"
    for number, about in enumerate(given(key) or []):
        where = f"{key}[{number}]"
        yield from at_its_paths(given, where, about, _form(given, where, about))
    streamed = given("pretraining_dataset") if not held_out else None
    for entry in streamed if isinstance(streamed, list) else [streamed] if streamed else []:
        about = {"path": entry} if isinstance(entry, str) else entry
        refuse_others(given, "pretraining_dataset", about, ("text_column",))
        if about.get("type", "pretrain") not in ("pretrain", "completion"):
            given.refuse("pretraining_dataset", f"its type {about['type']} is not converted")
        yield from at_its_paths(given, "pretraining_dataset", about, {"text_key": about.get("text_column", "text")})


def _form(given: Given, where: str, about: Mapping[str, Any]) -> Source:
    """The settings to read the records of a dataset."""
    kind = about.get("type")
    if given("rl") and kind in ("chat_template", "chat_template.default"):
        refuse_others(given, where, about, _PAIRS)
        _check_turns(given, where, about)
        fields = {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"}
        columns = {ours: about.get(f"field_{theirs}") or theirs for ours, theirs in fields.items()}
        return {"format": "preference", "columns": columns}
    if kind == "completion" and not given("rl"):
        refuse_others(given, where, about, ("field",))
        return {"text_key": about.get("field") or "text"}
    if kind == "chat_template" and not given("rl"):
        refuse_others(given, where, about, _CHAT)
        _check_turns(given, where, about)
        _check_mask(given, where, about)
        tools = {"tools": about["field_tools"]} if about.get("field_tools") else {}
        return {"columns": {"messages": about.get("field_messages") or "messages", **tools}}
    named = kind if isinstance(kind, str) else "this type"
    given.refuse(f"{where}.type", f"{named} writes texts of its own: write the records as messages, for chat_template")
    return {}


def _check_mask(given: Given, where: str, about: Mapping[str, Any]) -> None:
    if given("train_on_prompt"):
        given.refuse("train_on_prompt", "of templates the answers are trained: set train_on: all by hand")
    if not set(about.get("roles_to_train") or ()) <= ROLES["assistant"]:
        given.refuse(f"{where}.roles_to_train", "the answers are trained, or by train_on: all everything")
    for key in ("train_on_eos", "train_on_eot"):
        if about.get(key) not in (None, "turn"):
            given.refuse(f"{where}.{key}", "the end of every answer is trained, and no other")


def _check_turns(given: Given, where: str, about: Mapping[str, Any]) -> None:
    """Refuse turns whose keys or roles are not among the names that every run reads."""
    written = {"role": about.get("message_field_role"), "content": about.get("message_field_content")}
    asked = {key: name for key, name in written.items() if name} | dict(about.get("message_property_mappings") or {})
    if any(name not in PROPERTIES.get(key, ()) for key, name in asked.items()):
        given.refuse(f"{where}.message_property_mappings", "a turn has role and content, or from and value")
    if any(not set(names) <= ROLES.get(role, set()) for role, names in (about.get("roles") or {}).items()):
        given.refuse(f"{where}.roles", f"roles are {', '.join(sorted(set().union(*ROLES.values())))}")
    if about.get("chat_template") not in (None, "tokenizer_default", given("chat_template")):
        given.refuse(f"{where}.chat_template", "the template of the tokenizer is used for all data")
