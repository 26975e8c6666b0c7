"""The datasets of other trainers as sources of `data.train`."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.config.convert.given import Given
from fivefold.config.convert.rules import Keys


def data(given: Given) -> Keys:
    of: Mapping[str, Callable[[Given], Iterator[dict[str, Any]]]] = {
        "axolotl": _of_axolotl, "LLaMA-Factory": _of_llama_factory, "TRL": _of_trl,
    }  # fmt: skip
    sources = list(of[given.trainer](given))
    if given("train_on_prompt") or given("completion_only_loss") is False:
        sources = [{**source, "train_on": "all"} for source in sources]
    if given("mask_history"):
        sources = [{**source, "train_on": "last"} for source in sources]
    if sources:
        yield "data.train", sources
    else:
        given.note("no data is named: write data.train")
    yield "data.packing", bool(given("packing"))


def _of_axolotl(given: Given) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(given("datasets") or given("pretraining_dataset") or []):
        source: dict[str, Any] = {"path": _path(given, each)}
        kind = str(each.get("type", ""))
        if isinstance(each.get("type"), dict) or kind in ("input_output", "context_qa", "summarizetldr"):
            given.leave(f"datasets[{number}].type", "write the records as messages, or as prompt and completion")
        elif kind.startswith(("alpaca", "gpteacher", "oasst")):
            given.note(f"datasets[{number}]: turns by the chat template, where {kind} has a text of its own")
        elif given("rl") not in (None, "kto"):
            keys = {name: each.get(f"field_{name}") for name in ("messages", "chosen", "rejected")}
            named = {("prompt" if name == "messages" else name): key for name, key in keys.items() if key}
            source |= {"format": "preference", **({"columns": named} if named else {})}
        elif kind.startswith(("chat_template", "sharegpt")):
            source["format"] = "chat"
            if key := each.get("field_messages"):
                source["columns"] = {"messages": key}
        if key := each.get("field", each.get("text_column")):
            source["text_key"] = key
        if each.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
            given.leave(f"datasets[{number}].roles_to_train", "train_on: assistant, all or last")
        yield source


def _of_trl(given: Given) -> Iterator[dict[str, Any]]:
    text, only = given("dataset_text_field"), given("assistant_only_loss")
    split, other = given("dataset_train_split", "train"), given("dataset_test_split", "test")
    listed = given("datasets") or []
    if name := given("dataset_name"):
        listed = [{"path": name, "name": given("dataset_config"), "split": split}, *listed]
        if given("eval_strategy", "no") != "no":
            given.found.keys["data.validation"] = [{"path": _path(given, {**listed[0], "split": other})}]
    if listed and only is None:
        given.note("answers alone are trained; TRL trains all turns of messages: train_on: all in data.train does so")
    for each in listed:
        yield {"path": _path(given, each), **({"text_key": text} if text else {})}


def _of_llama_factory(given: Given) -> Iterator[dict[str, Any]]:
    names, folder = given("dataset") or [], given.folder / str(given("dataset_dir", "data"))
    if not folder.is_dir():
        folder = Path(str(given("dataset_dir", "data")))
    file = folder / "dataset_info.json"
    listed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in names.split(",") if isinstance(names, str) else names:
        about = listed.get(name.strip())
        if about is None:
            given.note(f"dataset {name.strip()}: it is not in {file}; write its path")
            yield {"path": name.strip()}
            continue
        hub = about.get("hf_hub_url") or about.get("ms_hub_url")
        local = str(folder / about["file_name"]) if "file_name" in about else ""
        source: dict[str, Any] = {"path": local or f"hub:{hub}?split={about.get('split', 'train')}"}
        columns = about.get("columns", {})
        ours = {
            "messages": "messages", "prompt": "prompt", "response": "completion", "system": "system",
            "kto_tag": "label",
        }  # fmt: skip
        renamed = {ours[key]: value for key, value in columns.items() if key in ours}
        if about.get("ranking"):
            parts = {"messages": "prompt", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
            named = {parts[key]: value for key, value in columns.items() if key in parts}
            source |= {"format": "preference", **({"columns": named} if named else {})}
        elif given("stage", "sft") == "pt":
            source["text_key"] = columns.get("prompt", "text")
        elif about.get("formatting") == "sharegpt":
            rated = {"label": columns["kto_tag"]} if "kto_tag" in columns else {}
            source |= {"format": "chat", "columns": {"messages": columns.get("messages", "conversations"), **rated}}
        elif renamed and renamed != {"prompt": "instruction", "completion": "output"}:
            source["columns"] = renamed
        if "query" in columns and columns["query"] != "input":
            given.leave(f"{name}.columns.query", "write the input into the prompt")
        yield source


def _path(given: Given, about: Mapping[str, Any]) -> str:
    """Where a dataset is, in the words of `data.train`: a file, or a name of the hub."""
    files = about.get("data_files")
    path = str(about.get("path") or "")
    if files:
        return str(files[0] if isinstance(files, list) else files)
    is_file = path.endswith((".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst", ".xz"))
    is_local = path.startswith((".", "/", "~")) or Path(path).exists() or (given.folder / path).exists()
    if is_file or is_local or "://" in path or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return path
    options = {"config": about.get("name"), "split": about.get("split"), "revision": about.get("revision")}
    asked = "&".join(f"{key}={value}" for key, value in options.items() if value)
    return f"hub:{path}{'?' if asked else ''}{asked}"
