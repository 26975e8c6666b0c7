"""The datasets of TRL."""

from collections.abc import Collection, Iterator

from fivefold.convert.given import Given
from fivefold.convert.sources import Source, at_its_paths, keys_of, refuse_others


def sources(given: Given, held_out: bool) -> Iterator[Source]:
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
            yield {**source, **_form(given, keys_of(given, source["path"]))}


def _form(given: Given, keys: Collection[str]) -> Source:
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
    source: Source = {"columns": {"messages": "messages"}, "train_on": "assistant" if answers else "all"}
    unknown = "read as messages, all of which TRL trains; where records are others, the run says which keys they have"
    return source if keys or answers else {**source, "changed": unknown}
