"""The tokenizer of a run: always a Hugging Face folder, whether it is the model's, built in, or trained on the corpus.

`tokenizers` alone is used (importing `transformers` costs seconds); the folders load in `AutoTokenizer` all the same.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fivefold.core.cache import Progress, entry, file_digest, key_of, say_aloud, write_atomically
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import expanded
from fivefold.core.hub import MODEL, is_hub_id, snapshot
from fivefold.core.integrity import check_file, file_checksum, read_signed, signed
from fivefold.data import tokenizer_probe
from fivefold.data.chat import ChatTemplate, token_text, tokenizer_json
from fivefold.data.source import FileList

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Bos = Literal["auto"] | bool  # `data.bos`
EOS = "<|endoftext|>"
_BYTES = 256
_TRAIN_VERSION = 1  # raise when what `train:N` gives changes
_FACTS_VERSION = 2  # raise when what is remembered of a folder changes
_SAMPLE_CHARACTERS = 4_000_000  # a byte-level BPE of some thousand entries changes little after that
_SAMPLE_FILES = 2048
_CHECKSUMS = "checksums.json"  # of the files of a folder in the cache
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
_MOST_BYTES = 2**29  # of a tokenizer.json; the largest known has 35 MB
_PROBE_BYTES, _PROBE_BYTES_A_BYTE = 2**29, 40  # memory to load and try it in
# Beyond its memory the probe aborts; these signals come from someone else.
_ENDED_FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_PROBE_SECONDS = 120
_MORE = "tokenizer.name_or_path: auto, byte, train:8192, or a Hugging Face folder with tokenizer.json"


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer folder and what can be said without loading it. `digest` is its identity: contents and EOS.

    `template_ids` are what the tokenizer itself puts in front of a text, `bos_token_id` is the BOS that its files name,
    `bos_token_ids` is what this run puts in front of each document: see `data.bos`. `bos` is how that is written.
    """

    folder: Path
    digest: str
    vocab_size: int
    eos_token_id: int
    template_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    bos_token_ids: tuple[int, ...] = ()
    bos: str = ""

    @cached_property
    def template(self) -> ChatTemplate:
        """How it writes conversations."""
        return ChatTemplate.of(self.folder)

    def load(self) -> "Tokenizer":
        """The tokenizer, which then neither cuts nor pads."""
        return _read(self.folder / "tokenizer.json")


def find_tokenizer(
    name: str,
    *,
    model: str,
    corpus: Sequence[FileList],
    root: Path,
    progress: Progress | None = None,
    bos: Bos = "auto",
) -> TokenizerInfo:
    """The tokenizer that `tokenizer.name_or_path: name` means; built in the cache at `root` if need be.

    `corpus` is what `train:N` learns from, `bos` is `data.bos`. Raises UserError if there is no such tokenizer, it has
    no EOS, or it has no BOS and one is asked for.
    """
    if name == "byte":
        folder = _cached(root, ["byte"], lambda folder: _save(_byte_tokenizer(), folder))
    elif name.startswith("train:"):
        folder = _trained(name, corpus, root, progress)
    else:
        folder = _folder_of(model, auto=True) if name == "auto" else _folder_of(name, auto=False)
    return _with_bos(_inspect(folder, root), bos)


def template_ids(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """What the tokenizer's post-processor puts in front of a text: BOS for Llama, Mistral and Gemma, nothing for GPT-2.

    `AutoTokenizer` puts the same: of a folder with a tokenizer.json it follows that file, not `add_bos_token`.
    """
    encoded = tokenizer.encode("a")
    ids: list[int] = encoded.ids
    text = next((i for i, special in enumerate(encoded.special_tokens_mask) if not special), 0)
    return tuple(ids[:text])


def put_bos(ids: list[int], bos_token_ids: tuple[int, ...]) -> list[int]:
    """The tokens of a text with BOS in front, once: a text that begins with it (a rendered chat) gets no second one.

    A text without tokens stays empty: BOS and EOS alone would teach that a text ends at once.
    """
    return ids if not ids or tuple(ids[: len(bos_token_ids)]) == bos_token_ids else [*bos_token_ids, *ids]


def _with_bos(found: TokenizerInfo, bos: Bos) -> TokenizerInfo:
    if bos is False:
        return found
    if found.template_ids or bos == "auto":
        return replace(found, bos_token_ids=found.template_ids)
    if found.bos_token_id is None:
        raise UserError(
            f"data.bos: true, but the tokenizer in {found.folder} has no BOS token",
            fix="data.bos=auto, or name a bos_token in its tokenizer_config.json",
            more=_MORE,
        )
    return replace(found, bos_token_ids=(found.bos_token_id,))


def _trained(name: str, corpus: Sequence[FileList], root: Path, progress: Progress | None) -> Path:
    size = _vocabulary_size(name)
    _refuse_stores(corpus)
    files = [
        [form.name, form.options(one.source), form.digest(path, root)] for one in corpus for path, form in one.files
    ]
    parts = ["train", _TRAIN_VERSION, _SAMPLE_CHARACTERS, size, files]
    return _cached(root, parts, lambda folder: _save(_train(size, corpus, progress), folder))


def _cached(root: Path, parts: list[Any], build: Callable[[Path], None]) -> Path:
    def read(folder: Path) -> Path:
        for name, checksum in read_signed(folder / _CHECKSUMS).items():
            check_file(folder / name, str(checksum), root)
        return folder

    def write(beside: Path, damage: str) -> None:
        if damage and (folder / _CHECKSUMS).exists():  # earlier versions wrote none
            say_aloud(f"DAMAGED: the cached tokenizer {folder.name}: {damage}; it is made again")
        build(beside)
        checksums = {path.name: file_checksum(path) for path in sorted(beside.iterdir())}
        (beside / _CHECKSUMS).write_text(signed(checksums), encoding="utf-8")

    folder = root / "tokenizers" / f"{parts[0]}-{key_of(*parts)}"
    return entry(folder, read=read, build=write)


def _refuse_stores(corpus: Sequence[FileList]) -> None:
    for one in corpus:
        if one.store:
            raise UserError(
                f"{one.source.label}: a token store holds no text to train a tokenizer on",
                fix="set tokenizer.name_or_path to the tokenizer folder the store was made with",
            )


def _vocabulary_size(name: str) -> int:
    digits = name.removeprefix("train:")
    smallest = _BYTES + 1
    if not digits.isdigit() or int(digits) < smallest:
        raise UserError(
            f"tokenizer.name_or_path: {name!r}: the vocabulary needs {smallest} entries or more (the bytes and {EOS})",
            fix="tokenizer.name_or_path=train:8192",
        )
    return int(digits)


# A Hugging Face folder.


def _folder_of(name: str, *, auto: bool) -> Path:
    path = expanded(name)
    folder = path.parent if path.is_file() else path
    if folder.is_dir():
        if (folder / "tokenizer.json").is_file():
            return folder
        raise _no_tokenizer(f"{folder} holds no tokenizer.json", auto)
    if is_hub_id(name):
        return _from_hub(name, auto)
    raise _no_tokenizer(f"the model {name!r} comes without a tokenizer" if auto else f"no folder {name!r}", auto)


def _no_tokenizer(what: str, auto: bool) -> UserError:
    key = "tokenizer.name_or_path" + (" (auto: the model's own)" if auto else "")
    return UserError(f"{key}: {what}", fix="tokenizer.name_or_path=byte, or train:8192", more=_MORE)


def _from_hub(name: str, auto: bool) -> Path:
    """The tokenizer files of a hub id: those already on this machine, else downloaded (the user named the id)."""
    from huggingface_hub import snapshot_download

    files = ["tokenizer*.json", *_CONFIG_FILES]
    try:
        folder = Path(snapshot_download(name, allow_patterns=files, local_files_only=True))
    except Exception:  # no copy here
        folder = None
    if folder is None or not (folder / "tokenizer.json").is_file():
        folder = snapshot(name, files, key=MODEL if auto else "tokenizer.name_or_path")
    if (folder / "tokenizer.json").is_file():
        return folder
    raise _no_tokenizer(f"{name!r} on the hub has no tokenizer.json", auto)


def _inspect(folder: Path, root: Path) -> TokenizerInfo:
    """Size and EOS of a folder, remembered by its files' contents: parsing a large tokenizer.json takes a second."""
    digests = [
        file_digest(folder / name, root) for name in ("tokenizer.json", *_CONFIG_FILES) if (folder / name).is_file()
    ]
    note = root / "tokenizers" / f"info-{key_of(_FACTS_VERSION, digests)}.json"
    try:
        facts = json.loads(note.read_text())
    except (OSError, ValueError):
        facts = _facts(folder, digests[0])
        write_atomically(note, json.dumps(facts))
    return TokenizerInfo(folder=folder, **{**facts, "template_ids": tuple(facts["template_ids"])})


def _check(file: Path) -> None:
    """Raise `UserError` for a tokenizer.json that cannot be loaded, or that needs far more memory than its size tells.

    Tried in another process first, whose memory is bounded: a file of a few hundred bytes can ask for all there is.
    """
    if not file.is_file():  # a pipe would never end
        raise _not_a_tokenizer(file, "not a regular file")
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise _not_a_tokenizer(file, f"{size:,} bytes, and at most {_MOST_BYTES:,} are read")
    most = _PROBE_BYTES + _PROBE_BYTES_A_BYTE * size
    command = [sys.executable, "-P", str(Path(tokenizer_probe.__file__)), str(file), str(most)]
    one_thread = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, env=one_thread, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, timeout=_PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _not_a_tokenizer(file, f"a short text is not encoded within {_PROBE_SECONDS} s") from None
    if -done.returncode in _ENDED_FROM_OUTSIDE:
        raise RunFailed(
            f"{file}: the process that tried it was ended by {signal.Signals(-done.returncode).name}",
            fix="start the command again",
        )
    if done.returncode:
        raise _not_a_tokenizer(file, f"loading it and encoding a short text takes more than {most >> 20} MiB")
    if found := done.stdout.strip():
        raise _not_a_tokenizer(file, found)


def _not_a_tokenizer(file: Path, why: object) -> UserError:
    return UserError(f"{file}: not a tokenizer: {why}", fix="copy the file from its origin again", more=_MORE)


def _facts(folder: Path, digest: str) -> dict[str, Any]:
    _check(folder / "tokenizer.json")
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    eos = _named_id(folder, vocabulary, "eos")
    if eos is None:
        raise UserError(
            f"the tokenizer in {folder} has no EOS token, and every document must end with one",
            fix='add "eos_token" to its tokenizer_config.json',
            more=_MORE,
        )
    template, bos = template_ids(tokenizer), _named_id(folder, vocabulary, "bos")
    bos = bos if bos in vocabulary.values() else None
    written = "".join(str(tokenizer.id_to_token(number)) for number in template or (() if bos is None else (bos,)))
    return {
        "digest": key_of(digest, eos),
        "vocab_size": max(eos, *vocabulary.values()) + 1,
        "eos_token_id": eos,
        "template_ids": template,
        "bos_token_id": bos,
        "bos": written if written.isprintable() else repr(written),
    }


def read_vocabulary(path: Path) -> dict[str, int]:
    """The tokens of a tokenizer.json and their numbers, added ones among them."""
    found: dict[str, int] = _read(path).get_vocab(with_added_tokens=True)
    return found


def _read(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise _not_a_tokenizer(path, error) from error
    tokenizer.no_truncation()  # a tokenizer.json may carry both from whoever saved it
    tokenizer.no_padding()
    return tokenizer


def _named_id(folder: Path, vocabulary: dict[str, int], which: Literal["bos", "eos"]) -> int | None:
    """BOS or EOS as the tokenizer's own files name it, else as the model's config.json does."""
    for name in _CONFIG_FILES:
        facts = tokenizer_json(folder / name)
        content = token_text(facts.get(f"{which}_token"))
        if content is not None and content in vocabulary:
            return vocabulary[content]
        number = facts.get(f"{which}_token_id") if name == "config.json" else None
        first = number[0] if isinstance(number, list) and number else number
        if isinstance(first, int):
            return first
    return None


# The two that are ours: byte-level, so that every text is representable and decodes to itself.


def _byte_tokenizer() -> "Tokenizer":
    """Token i is byte i; 256 is EOS."""
    return _byte_level({character: byte for byte, character in enumerate(_byte_characters())} | {EOS: _BYTES})


def _byte_characters() -> Iterator[str]:
    """The printable stand-in of each byte, 0 to 255, as byte-level BPE writes them (GPT-2): printable Latin-1
    characters stand for themselves, the others for characters from 256 on."""
    others = iter(range(256, 512))
    for byte in range(_BYTES):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        yield chr(byte if printable else next(others))


def _byte_level(vocabulary: dict[str, int] | None) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]) if vocabulary else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if vocabulary:
        tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def _train(size: int, corpus: Sequence[FileList], progress: Progress | None) -> "Tokenizer":
    from tokenizers import pre_tokenizers, trainers

    if progress:
        progress("training the tokenizer", 0, 1)
    tokenizer = _byte_level(None)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    if progress:
        progress("training the tokenizer", 1, 1)
    return tokenizer


def _sample(corpus: Sequence[FileList]) -> Iterator[str]:
    """The first characters of evenly spaced files, each file by its share of the bytes: the same sample every time."""
    files = [(one.source, path, form) for one in corpus for path, form in one.files]
    files = files[:: -(-len(files) // _SAMPLE_FILES)]
    sizes = [form.size(path) for _, path, form in files]
    share = min(1.0, _SAMPLE_CHARACTERS / max(1, sum(sizes)))
    for (source, path, form), size in zip(files, sizes, strict=True):
        budget = int(size * share) + 1
        for document in form.documents(path, source):
            text = document if isinstance(document, str) else document.plain
            yield text[:budget]
            budget -= len(text)
            if budget <= 0:
                break


def _save(tokenizer: "Tokenizer", folder: Path) -> None:
    # Not by `save`, whose errors, as of a full disk, are a bare Exception.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
