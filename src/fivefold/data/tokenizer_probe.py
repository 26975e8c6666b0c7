"""Reads a tokenizer's folder as `AutoTokenizer` does, in a process of its own with little memory.

Run as a script by `data.tokenizer`: `python -P tokenizer_probe.py FOLDER OUT BYTES HUB_ID`. Saves the tokenizer as
`transformers` reads it in OUT, with further facts in OUT/facts.json. A small file may ask for any amount of memory
(thirty `Replace` normalizers double a text thirty times), and the Rust library answers some damage with a panic, which
`except Exception` does not catch. Prints the problem, or nothing if there is none.
"""

import ctypes
import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

TOKENIZER, FACTS, _CONFIG = "tokenizer.json", "facts.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
MOST_TOKENS_A_CHARACTER = 100  # multi-byte characters and a template's special tokens stay far below
_SAMPLE = "".join(map(chr, range(32, 127))) + "\n\t é漢字🙂  Ａ ﬁ\r\n 12345 don't "


def read(folder: str, out: str, hub_id: str = "") -> str | None:
    """Save the tokenizer that `AutoTokenizer` reads from `folder` in the folder `out`; return the problem, if any.
    `hub_id`: the hub id that the folder is a copy of, or ""."""
    from transformers import AutoTokenizer

    named = {"config": _config_of(folder, hub_id)} if hub_id else {}
    read = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **named)
    name = type(read).__name__
    if not getattr(read, "is_fast", False):
        return f"{name} has no form that the tokenizers library runs"
    tokenizer = read.backend_tokenizer
    tokenizer.no_truncation()  # a tokenizer.json may contain both
    tokenizer.no_padding()
    encoding = _encoding(tokenizer)
    patterns = _texts([encoding["normalizer"], encoding["pre_tokenizer"]])
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    text = f"{_SAMPLE} {' '.join(patterns)[:10_000]} {' '.join(added)[:10_000]}"
    ids, whole = tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.encode(text).ids
    if len(whole) > MOST_TOKENS_A_CHARACTER * len(text):
        return f"it makes {len(whole)} tokens of {len(text)} characters"
    templates = read.chat_template
    each = [*templates.values()] if isinstance(templates, dict) else [templates]
    if not all(template is None or isinstance(template, str) for template in each):
        return "its chat template is no text"
    eos, front = _eos(read, folder), template_ids(tokenizer)
    first = front or [read.bos_token_id] * (read.bos_token_id is not None)
    own = _own(Path(folder) / TOKENIZER)
    is_own = own is not None and not read.split_special_tokens and _encoding(own) == encoding
    facts = {
        "class": name,
        "encoding": "" if is_own else blake2b(json.dumps(encoding).encode(), digest_size=16).hexdigest(),
        "overrules": own is not None and not is_own and ids != own.encode(text, add_special_tokens=False).ids,
        "splits_special": bool(read.split_special_tokens),
        "vocab_size": max([-1 if eos is None else eos, *tokenizer.get_vocab(with_added_tokens=True).values()]) + 1,
        "eos_token_id": eos,
        "template_ids": front,
        "bos_token_id": read.bos_token_id,
        "bos": "".join(str(tokenizer.id_to_token(number)) for number in first),
        "special": read.special_tokens_map,
        # BOS begins texts, and ends no answer.
        "ends": [token for token in added if token.strip() and token not in {read.bos_token} - {read.eos_token}],
        "stops": [tokenizer.id_to_token(number) for number in _named(Path(folder, GENERATION))],
        "chat_template": templates,
    }
    read.save_pretrained(out)
    _restore_settings(Path(folder, _CONFIG), Path(out, _CONFIG))
    Path(out, FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return None


def _named(file: Path) -> list[int]:
    """The end tokens that a config of the model names."""
    named: Any = None
    with suppress(OSError, ValueError, AttributeError):  # the model's reader says what is wrong with it
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return [number for number in (named if isinstance(named, list) else [named]) if isinstance(number, int)]


def _config_of(folder: str, hub_id: str) -> Any:
    """The model's config as `AutoTokenizer` reads it by a hub id; some ids decide the class."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError):
        return PreTrainedConfig.from_pretrained(folder, local_files_only=True)
    config._name_or_path = hub_id
    return config


def _restore_settings(original: Path, saved: Path) -> None:
    """Restore class settings that `save_pretrained` leaves out, such as Llama's `legacy`."""
    if not original.is_file():
        return
    given, kept = (json.loads(path.read_text(encoding="utf-8")) for path in (original, saved))
    lost = {key: value for key, value in given.items() if key not in kept and isinstance(value, bool | int)}
    saved.write_text(json.dumps(lost | kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def template_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that the post-processor of a tokenizer puts in front of a text: BOS for Llama, Mistral and Gemma, nothing
    for GPT-2."""
    encoded = tokenizer.encode("a")
    ids: list[int] = encoded.ids
    text = next((i for i, special in enumerate(encoded.special_tokens_mask) if not special), 0)
    return tuple(ids[:text])


def _eos(read: Any, folder: str) -> int | None:
    """The EOS of the tokenizer, else the first that the model's config names."""
    named = next(iter(_named(Path(folder, "config.json"))), None)
    return named if read.eos_token_id is None else read.eos_token_id


def _own(file: Path) -> Any:
    """The tokenizer of a tokenizer.json by itself; None if there is no such file."""
    from tokenizers import Tokenizer

    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encoding(tokenizer: Any) -> dict[str, Any]:
    """The parts of a tokenizer that decide the tokens of a text, without the surrounding settings."""
    tree = json.loads(tokenizer.to_str())
    return {part: _plain(tree.get(part)) for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def _plain(tree: Any) -> Any:
    """Drop settings that do not change tokens: the offsets of tokens, and the choice between "" and null."""
    if isinstance(tree, list):
        return [_plain(branch) for branch in tree]
    if not isinstance(tree, dict):
        return None if tree == "" else tree
    return {
        key: value if key in ("vocab", "merges") else _plain(value)
        for key, value in tree.items()
        if key != "trim_offsets"
    }


def _texts(tree: Any) -> Iterator[str]:
    """The short texts in a tree, such as the patterns of replacements."""
    if isinstance(tree, str):
        yield tree[:1000]
    elif isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(inner)


def _said(error: BaseException, folder: str) -> str:
    """The message for an error while reading a folder, attributed to its config if that alone cannot be read."""
    from transformers import AutoConfig

    where = ""
    if Path(folder, "config.json").is_file():
        try:
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as of_config:
            where = "its config.json: " if str(of_config) == str(error) else ""
    return f"{where}{type(error).__name__}: {str(error).strip()}".removesuffix(": ")


def _limit(more: int) -> None:
    """Limit this process to `more` bytes of memory beyond its current size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with_parent() -> None:
    """On Linux, end with the parent: it keeps the time limit, and may be killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent()
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers need none, and it takes seconds
    import transformers.models.auto.tokenization_auto  # noqa: F401

    _limit(int(sys.argv[3]))
    try:
        found = read(sys.argv[1], sys.argv[2], sys.argv[4])
    except BaseException as error:  # a panic of the Rust library is no Exception
        found = _said(error, sys.argv[1])
    print((found or "").replace("\n", " ")[:300])
