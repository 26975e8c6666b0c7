"""The datasets of other trainers as sources of `data.train`."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.convert.given import Given
from fivefold.convert.rules import Keys
from fivefold.data.formats import discover
from fivefold.data.records import Records, parts_of
from fivefold.data.source import Source

Entry = dict[str, Any]  # an entry of `data.train`; `changed`: the remark on it

ROLES = {"user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "system": {"system"}, "tool": {"tool"}}
PROPERTIES = {"role": {"role", "from"}, "content": {"content", "value"}}
_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst", ".xz", ".bz2")
_BUILDERS = ("json", "csv", "text", "parquet", "arrow")  # names in the `datasets` library, used in place of a path
# Keys of a dataset that `at_its_paths` reads, and those that change nothing.
_READ = ("path", "name", "split", "revision", "type", "data_files")
_HARMLESS = ("ds_type", "trust_remote_code", "preprocess_shards")
_OWN = ("tokenizer_default", "tokenizer_default_fallback_chatml")  # axolotl's names for the behaviour of a run
_GENERIC = ("alpaca", "default", "empty", "fewshot", "vicuna", "jinja")  # templates of no model family


def data(given: Given) -> Keys:
    sources = {"axolotl": _axolotl_sources, "LLaMA-Factory": _llamafactory_sources, "TRL": _trl_sources}[given.trainer]
    train, held_out = (list(sources(given, held_out)) for held_out in (False, True))
    changed = [source.pop("changed", "") for source in [*train, *held_out]]
    if not train:
        given.note("no data is named: write data.train")
        return
    yield "data.train", train, _template(given), *dict.fromkeys(changed)
    if held_out:
        yield "data.validation", held_out


def _template(given: Given) -> str:
    """The remark on the chat template, if the file names one."""
    if given.trainer == "TRL" or given("stage") == "pt":
        return ""
    key = "template" if given.trainer == "LLaMA-Factory" else "chat_template"
    name = given(key)
    if name is None or name in _OWN:
        return ""
    if name in _GENERIC:
        given.refuse(key, f"{name} is of no family of models, and the template of the tokenizer is used")
    return f"the template is the tokenizer's, or ChatML where it has none; {name} of {given.trainer} there"


# ---- common to all trainers: places, and keys of records -------------------------------------------------------------


def refuse_others(given: Given, where: str, about: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse every active key of a dataset that is not `known`; list those that change nothing."""
    for key, value in about.items():
        if key in _HARMLESS:
            given.found.left[f"{where}.{key}"] = "speed and memory, not what is trained"
        if key not in (*known, *_READ, *_HARMLESS) and value not in (None, False, "", [], {}):
            given.refuse(f"{where}.{key}", "it is not converted")


def at_its_paths(given: Given, where: str, about: Mapping[str, Any], form: Entry) -> Iterator[Entry]:
    """A source for each file of a dataset, or one for its name on the hub."""
    path, files, split = str(about.get("path") or ""), about.get("data_files"), about.get("split")
    if split and re.search(r"[\[+]", str(split)):
        given.refuse(f"{where}.split", f"{split} is a part of a split")
    if "://" in path:
        given.refuse(f"{where}.path", "download it, and name the files")
    folder = next((candidate for candidate in (Path(path), given.folder / path) if path and candidate.is_dir()), None)
    is_local = folder is not None or _is_file(given, path)
    if files and (isinstance(files, dict) or not (is_local or path in _BUILDERS)):
        given.refuse(f"{where}.data_files", "name the files of a folder; of the hub, a config and a split")
    elif files:
        for file in [files] if isinstance(files, str) else files:
            yield {"path": str(folder / file) if folder else file, **form}
    elif is_local or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        if split not in (None, "train"):
            given.refuse(f"{where}.split", "files have no splits: name those of it")
        yield {"path": path, **form}
    else:
        yield {"path": on_hub(path, about.get("name"), split, about.get("revision")), **form}


def _is_file(given: Given, path: str) -> bool:
    return path.endswith(_SUFFIXES) or path.startswith((".", "/", "~")) or (given.folder / path).is_file()


def on_hub(name: str, config: str | None, split: str | None, revision: str | None = None) -> str:
    options = {"config": config, "split": split, "revision": revision}
    asked = "&".join(f"{key}={value}" for key, value in options.items() if value)
    return f"hub:{name}{'?' if asked else ''}{asked}"


def keys_of(given: Given, path: str) -> tuple[str, ...]:
    """The keys of the first record of a file; empty if there is no such local file."""
    return tuple(next(iter(_records(given, path)), {}))


def has_more(given: Given, path: str, most: int) -> bool | None:
    """True if a file has more than `most` records; None if there is no such local file."""
    found = sum(1 for _ in islice(_records(given, path), most + 1))
    return found > most if found else None


def _records(given: Given, path: str) -> Iterator[Mapping[str, object]]:

    file = next((candidate for candidate in (Path(path), given.folder / path) if candidate.is_file()), None)
    form = next((candidate for candidate in discover() if file and candidate.matches(file)), None)
    if file and isinstance(form, Records):
        yield from (record for _, record in form.records(file, Source(path=path, label="data.train")))


# ---- axolotl ---------------------------------------------------------------------------------------------------------

_TURNS = ("message_field_role", "message_field_content", "message_property_mappings", "roles", "chat_template")
_CHAT = (*_TURNS, "field_messages", "field_tools", "roles_to_train", "train_on_eos", "train_on_eot")
_PAIRS = (*_TURNS, "field_messages", "field_chosen", "field_rejected")


def _axolotl_sources(given: Given, held_out: bool) -> Iterator[Entry]:
    """The sources of `datasets`, or of `test_datasets`."""
    key = "test_datasets" if held_out else "datasets"
    for number, about in enumerate(given(key) or []):
        where = f"{key}[{number}]"
        yield from at_its_paths(given, where, about, _axolotl_form(given, where, about))
    streamed = given("pretraining_dataset") if not held_out else None
    for entry in streamed if isinstance(streamed, list) else [streamed] if streamed else []:
        about = {"path": entry} if isinstance(entry, str) else entry
        refuse_others(given, "pretraining_dataset", about, ("text_column",))
        if about.get("type", "pretrain") not in ("pretrain", "completion"):
            given.refuse("pretraining_dataset", f"its type {about['type']} is not converted")
        yield from at_its_paths(given, "pretraining_dataset", about, {"text_key": about.get("text_column", "text")})


def _axolotl_form(given: Given, where: str, about: Mapping[str, Any]) -> Entry:
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


# ---- LLaMA-Factory, whose datasets are listed in dataset_info.json ---------------------------------------------------

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


def _llamafactory_sources(given: Given, held_out: bool) -> Iterator[Entry]:
    """The sources of `dataset`, or of `eval_dataset`."""
    key = "eval_dataset" if held_out else "dataset"
    names, folder = given(key) or [], given.folder / str(given("dataset_dir"))
    if not folder.is_dir():
        folder = Path(str(given("dataset_dir")))
    file = folder / "dataset_info.json"
    listed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in (part.strip() for part in (names.split(",") if isinstance(names, str) else names)):
        if name in listed:
            yield _llamafactory_source(given, name, listed[name], folder)
        else:
            given.refuse(key, f"{name} is not in {file}")


def _llamafactory_source(given: Given, name: str, about: Mapping[str, Any], folder: Path) -> Entry:
    for key in about.keys() - _KNOWN:
        given.refuse(f"{name}.{key}", "it is not converted")
    if any(value not in _TAGS.get(tag, ()) for tag, value in (about.get("tags") or {}).items()):
        given.refuse(f"{name}.tags", "a turn has role and content, or from and value, of user, assistant, human, gpt")
    columns = about.get("columns") or _COLUMNS  # if some are named, the others have no default
    for key in columns.keys() & {"images", "videos", "audios"}:
        given.refuse(f"{name}.columns.{key}", "text alone is trained")
    source: Entry = {"path": _listed_path(given, name, about, folder)}
    if given("stage") == "pt":
        source["text_key"] = columns.get("prompt", "text")
    else:
        source |= _llamafactory_form(given, name, about, columns)
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


def _listed_path(given: Given, name: str, about: Mapping[str, Any], folder: Path) -> str:
    if "hf_hub_url" in about:
        return on_hub(about["hf_hub_url"], about.get("subset"), about.get("split", "train"))
    if "file_name" not in about:
        given.refuse(name, "it is neither a file nor on the Hugging Face hub")
    return str(folder / str(about.get("file_name")))


def _llamafactory_form(given: Given, name: str, about: Mapping[str, Any], columns: Mapping[str, str]) -> Entry:
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


def _read_besides(source: Entry, keys: Collection[str]) -> list[str]:
    """The keys of a record that are read by their names although `columns` leave them out."""

    columns = source["columns"]
    if not keys or not {columns[part] for part in ("prompt", "completion", "messages") if part in columns} <= set(keys):
        return []
    parts = parts_of(keys, Source(path="", label="data.train", format=source["format"], columns=columns))
    return sorted(set(parts.keys) - set(columns.values())) if parts else []


# ---- TRL -------------------------------------------------------------------------------------------------------------


def _trl_sources(given: Given, held_out: bool) -> Iterator[Entry]:
    """The sources of `dataset_name`, or of `datasets`."""
    if held_out and given("eval_strategy") in (None, "no", False):
        return
    split = given("dataset_test_split" if held_out else "dataset_train_split")
    listed = [{"path": given("dataset_name"), "name": given("dataset_config"), "split": split}]
    if not given("dataset_name"):
        listed = [] if held_out else [dict(entry) for entry in given("datasets") or []]
    for about in listed:
        refuse_others(given, "datasets", about, ("columns",))
        for source in at_its_paths(given, "datasets", about, {}):
            yield {**source, **_trl_form(given, keys_of(given, source["path"]))}


def _trl_form(given: Given, keys: Collection[str]) -> Entry:
    """The settings to read records, which TRL recognises by their keys. With unknown keys: as messages only."""
    if name := given.found.keys.get("objective.name"):
        return {} if name == "kto" else {"format": "preference"}
    answers, completion, text = given("assistant_only_loss"), given("completion_only_loss"), given("dataset_text_field")
    if {"prompt", "completion"} <= set(keys) or (completion and not keys):
        train_on = "all" if completion is False else "assistant"
        return {"columns": {"prompt": "prompt", "completion": "completion"}, "train_on": train_on}
    if text in keys or ("dataset_text_field" in given and not keys and not answers):
        return {"text_key": text}
    if keys and "messages" not in keys:
        given.refuse("dataset_name", f"TRL reads messages, {text}, or prompt and completion; it has {', '.join(keys)}")
    source: Entry = {"columns": {"messages": "messages"}, "train_on": "assistant" if answers else "all"}
    unknown = "read as messages, all of which TRL trains; where records are others, the run says which keys they have"
    return source if keys or answers else {**source, "changed": unknown}
