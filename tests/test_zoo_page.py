"""docs/evidence/folders.md has a line for every folder and record of the zoo, and as many as it says. `python -m
tests.test_zoo_page` writes its tables."""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.data import record_forms, test_spans, tokenizers_zoo
from tests.generation import test_settings
from tests.models import test_zoo, zoo

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "folders.md"
KINDS = ("chat", "tools", "instructions", "texts", "preferences", "rated")
BEGIN, END = "<!-- table: python -m tests.test_zoo_page -->", "<!-- end of zoo -->"


def _line(kind: str, names: Iterable[str], beside: str, file: str) -> str:
    named = list(names)
    said = "; ".join(name.replace("|", "\\|") for name in named)
    return f"| **{kind}** ({len(named)}) | {said} | {beside} | `tests/{file}` |"


def _folders(kind: str) -> list[str]:
    return [name.removeprefix(f"{kind}: ") for name in tokenizers_zoo.FOLDERS if name.startswith(f"{kind}: ")]


def table() -> str:
    """The whole zoo in Markdown."""
    models, tokenizers, records = "models/test_zoo.py", "data/test_tokenizer_zoo.py", "data/test_record_forms.py"
    ids = "ids of 50 texts, rendered chats, and the export, beside `AutoTokenizer`"
    weights = ["single", "sharded", "fp32", "bf16", "fp16", "one file beside an index", "tied with a head of its own",
               "tied with a head that is equal", "tied under the name of the head", "links", "NaN", "FP8", "MXFP4",
               "plain under a stale method", *(f"{each}, refused" for each in test_zoo.QUANTISED)]  # fmt: skip
    settings = [" and ".join(f"`{key}`" for key in each) for each in test_settings.SETTINGS]
    rows = "the rows and what is trained of them, spelled out by hand"
    lines = [
        "| what | shapes | compared | by |",
        "| --- | --- | --- | --- |",
        _line("configs", zoo.CONFIGS, "config, export and first loss (1e-6) beside `AutoConfig`", models),
        _line("weights", weights, "every tensor to the bit, and the first loss, beside `from_pretrained`", models),
        _line("special tokens", _folders("special tokens"), ids, tokenizers),
        _line("tokenizer classes", _folders("class"), ids, tokenizers),
        _line("places of templates", _folders("template"), ids, tokenizers),
        _line("published templates", test_spans.BY_HAND, "what is trained, read by hand", "data/test_spans.py"),
        _line("ends of turns", test_spans.ENDS, "what is trained, read by hand", "data/test_spans.py"),
        _line("generation settings", settings, "tokens beside `generate`", "generation/test_settings.py"),
        *(
            _line(f"records: {k}", (form.name for form in getattr(record_forms, k.upper())), rows, records)
            for k in KINDS
        ),
        _line("records, refused", (name for name, *_ in record_forms.REFUSED), "the reason", records),
    ]
    return "\n".join(lines)


def test_the_page_has_the_whole_zoo() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == _with_table(text)


def _with_table(text: str) -> str:
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
