"""The datasets of LLaMA-Factory, listed in its `dataset_info.json`."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.convert.given import Given
from fivefold.convert.sources import PROPERTIES, ROLES, Source, has_more, keys_of, on_hub

_KNOWN = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "formatting", "ranking", "subset", "split", "columns",
          "tags"}  # fmt: skip
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}  # defaults
# Names in LLaMA-Factory -> names in a run file.
_OURS = {"messages": "messages", "prompt": "prompt", "query": "input", "response": "completion", "history": "history",
         "system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected",
         "kto_tag": "label"}  # fmt: skip
_TAGS = {
    "role_tag": PROPERTIES["role"], "content_tag": PROPERTIES["content"], "user_tag": ROLES["user"],
    "assistant_tag": ROLES["assistant"], "system_tag": ROLES["system"], "observation_tag": {"observation", "tool"},
    "function_tag": {"function_call"},
}  # fmt: skip


def sources(given: Given, held_out: bool) -> Iterator[Source]:
    """The sources of `dataset`, or of `eval_dataset`."""
    key = "eval_dataset" if held_out else "dataset"
    names, folder = given(key) or [], given.folder / str(given("dataset_dir"))
    if not folder.is_dir():
        folder = Path(str(given("dataset_dir")))
    file = folder / "dataset_info.json"
    listed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in (part.strip() for part in (names.split(",") if isinstance(names, str) else names)):
        if name in listed:
            yield _source(given, name, listed[name], folder)
        else:
            given.refuse(key, f"{name} is not in {file}")


def _source(given: Given, name: str, about: Mapping[str, Any], folder: Path) -> Source:
    for key in about.keys() - _KNOWN:
        given.refuse(f"{name}.{key}", "it is not converted")
    if any(value not in _TAGS.get(tag, ()) for tag, value in (about.get("tags") or {}).items()):
        given.refuse(f"{name}.tags", "a turn has role and content, or from and value, of user, assistant, human, gpt")
    columns = about.get("columns") or _COLUMNS  # if some are named, the others have no default
    for key in columns.keys() & {"images", "videos", "audios"}:
        given.refuse(f"{name}.columns.{key}", "text alone is trained")
    source: Source = {"path": _path(given, name, about, folder)}
    if given("stage") == "pt":
        source["text_key"] = columns.get("prompt", "text")
    else:
        source |= _form(given, name, about, columns)
        if read := _read_besides(source, keys_of(given, source["path"])):
            given.refuse(f"{name}.columns", f"they leave out {', '.join(read)}, which would be read: take it out there")
    if given("stage") == "sft" and (given("train_on_prompt") or given("mask_history")):
        source["train_on"] = "all" if given("train_on_prompt") else "last"
    if most := int(given("max_samples") or 0):
        more = has_more(given, source["path"], most)
        if more:
            given.refuse("max_samples", f"{name} has more records, and all are read: cut the file")
        source["changed"] = f"all records are read; {most} of each there" if more is None else ""
    return source


def _path(given: Given, name: str, about: Mapping[str, Any], folder: Path) -> str:
    if "hf_hub_url" in about:
        return on_hub(about["hf_hub_url"], about.get("subset"), about.get("split", "train"))
    if "file_name" not in about:
        given.refuse(name, "it is neither a file nor on the Hugging Face hub")
    return str(folder / str(about.get("file_name")))


def _form(given: Given, name: str, about: Mapping[str, Any], columns: Mapping[str, str]) -> Source:
    """The settings to read records: turns, or an instruction with one answer, or with two."""
    formatting, is_pair = about.get("formatting", "alpaca"), bool(about.get("ranking"))
    kind = "preference" if is_pair else "chat"
    named = {_OURS[key]: value for key, value in columns.items() if key in _OURS}
    if formatting in ("sharegpt", "openai"):
        turns = {"prompt" if is_pair else "messages": named.get("messages", "conversations")}
        of_answers = ("chosen", "rejected") if is_pair else ("label",)
        return {"format": kind, "columns": turns | _picked(named, "system", "tools", *of_answers)}
    if formatting != "alpaca":
        given.refuse(f"{name}.formatting", f"{formatting} is not converted")
    answers = ("chosen", "rejected") if is_pair else ("completion", "label")
    return {"format": kind, "columns": _picked(named, "prompt", "input", "history", "system", "tools", *answers)}


def _picked(named: Mapping[str, str], *keys: str) -> dict[str, str]:
    return {key: named[key] for key in keys if key in named}


def _read_besides(source: Source, keys: Collection[str]) -> list[str]:
    """The keys of a record that are read by their names although `columns` leave them out."""
    from fivefold.data.records import parts_of
    from fivefold.data.source import Source as File

    columns = source["columns"]
    if not keys or not {columns[part] for part in ("prompt", "completion", "messages") if part in columns} <= set(keys):
        return []
    parts = parts_of(keys, File(path="", label="data.train", format=source["format"], columns=columns))
    return sorted(set(parts.keys) - set(columns.values())) if parts else []
