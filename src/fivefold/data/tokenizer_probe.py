"""Loads a tokenizer.json that someone else made and encodes a short text, in a process of its own with little memory.

Run as a script by `data.tokenizer`: `python -P tokenizer_probe.py FILE BYTES`. A small file may ask for any amount of
memory (thirty `Replace` normalizers double a text thirty times), and the Rust library answers some damage with a panic,
which `except Exception` does not catch. Prints what is wrong; prints nothing where all is well.
"""

import json
import resource
import sys
from collections.abc import Iterator
from typing import Any

MOST_TOKENS_A_CHARACTER = 100  # bytes of the longest characters, and a template's special tokens, are far below


def texts_of(tree: Any) -> Iterator[str]:
    """The short texts inside of a tree: patterns that a text must hold to be replaced."""
    if isinstance(tree, str):
        yield tree[:1000]
    elif isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from texts_of(inner)


def probe(file: str) -> str | None:
    """What is wrong with the tokenizer in `file`."""
    from tokenizers import Tokenizer

    with open(file, encoding="utf-8") as stream:
        tree = json.load(stream)
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    patterns = (text for part in ("normalizer", "pre_tokenizer") for text in texts_of(tree.get(part)))
    text = "".join(map(chr, range(32, 127))) + "\n\t é漢字🙂 " + " ".join(patterns)[:10_000]
    tokens = len(tokenizer.encode(text).ids)
    if tokens > MOST_TOKENS_A_CHARACTER * len(text):
        return f"it makes {tokens} tokens of {len(text)} characters"
    return None


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
    try:
        found = probe(sys.argv[1])
    except BaseException as error:  # a panic of the Rust library is no Exception
        found = f"{type(error).__name__}: {str(error).strip()}" if str(error).strip() else type(error).__name__
    print((found or "").replace("\n", " ")[:300])
