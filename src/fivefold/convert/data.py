"""The datasets of other trainers as sources of `data.train`."""

from collections.abc import Callable, Iterator, Mapping

from fivefold.convert import axolotl_data, llamafactory_data, trl_data
from fivefold.convert.given import Given
from fivefold.convert.rules import Keys
from fivefold.convert.sources import Source

_SOURCES: Mapping[str, Callable[[Given, bool], Iterator[Source]]] = {
    "axolotl": axolotl_data.sources,
    "LLaMA-Factory": llamafactory_data.sources,
    "TRL": trl_data.sources,
}
_OWN = ("tokenizer_default", "tokenizer_default_fallback_chatml")  # axolotl's names for the behaviour of a run
_GENERIC = ("alpaca", "default", "empty", "fewshot", "vicuna", "jinja")  # templates of no model family


def data(given: Given) -> Keys:
    train, held_out = (list(_SOURCES[given.trainer](given, held_out)) for held_out in (False, True))
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
