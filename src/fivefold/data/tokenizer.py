"""The tokenizer of a run: always a Hugging Face folder, from the model, built in, or trained on the corpus.

A folder is read as `AutoTokenizer` of the installed `transformers` reads it: class, special tokens of all files, and
templates. Another process does so once (`tokenizer_probe`), and the result is cached. Texts are encoded by
`tokenizers`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fivefold.core.cache import Progress, entry, file_digest, key_of, say_aloud
from fivefold.core.errors import RunFailed, UserError, first_line
from fivefold.core.files import expanded
from fivefold.core.folder_config import check_not_gguf, read_folder_config
from fivefold.core.hub import MODEL, is_hub_id, snapshot
from fivefold.core.integrity import check_file, file_checksum, read_signed, signed
from fivefold.core.text import shortened
from fivefold.data import tokenizer_probe
from fivefold.data.chat import BUILT_IN, ChatTemplate
from fivefold.data.examples import plain
from fivefold.data.source import FileList

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Bos = Literal["auto"] | bool  # `data.bos`
EOS = "<|endoftext|>"
_BYTES = 256
_TRAIN_VERSION = 2  # raise when the result of `train:N` changes
_READ_VERSION = 3  # raise when the cached facts of a folder change
_SAMPLE_CHARACTERS = 4_000_000  # a byte-level BPE of some thousand entries changes little after that
_SAMPLE_FILES = 2048
_CHECKSUMS = "checksums.json"  # checksums of the files of a cached folder
_FILE, _CONFIG = tokenizer_probe.TOKENIZER, "config.json"
_SETTINGS = (_CONFIG, tokenizer_probe.GENERATION)  # of the model, which are read with its tokenizer
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.*.json", "tokenizer.model*", "*.model", "*.spm", "*.tiktoken", "tekken.json", "vocab*",
    "merges.txt", "bpe.codes", "dict.txt",
)  # fmt: skip
_NO_VOCABULARY = (".py", ".pyc", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
# The files of a tokenizer, as names or patterns: fetched, read, and copied to saved models.
TOKENIZER_FILES = (
    *_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_MOST_BYTES = 2**29  # of a file; the largest known has 35 MB
_PROBE_BYTES, _PROBE_BYTES_A_BYTE = 2**29, 40  # memory to load and try a tokenizer
# Beyond its memory limit the probe aborts; these signals come from outside.
_ENDED_FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_PROBE_SECONDS = 300
_MORE = "tokenizer.name_or_path: auto, byte, train:8192, or a Hugging Face folder with tokenizer.json"


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer folder and its facts, available without loading it. `digest` is its identity: contents and EOS.

    `template_ids`: the tokens that the tokenizer itself puts in front of a text. `bos_token_id`: the BOS in its files.
    `bos_token_ids`: the tokens that this run puts in front of each document (see `data.bos`), and `bos` their text.
    `saved`: the folder that is loaded, and copied to saved models whose own tokenizer it is not: it names its class,
    which otherwise depends on the model next to it. `splits_special`: special tokens in a text are split like other
    text. `template`: its chat template. `kind`: the class that reads the folder; `overrules`: the class makes other
    tokens than tokenizer.json.
    """

    folder: Path
    digest: str
    vocab_size: int
    eos_token_id: int
    template_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    bos_token_ids: tuple[int, ...] = ()
    bos: str = ""
    saved: Path = Path()
    splits_special: bool = False
    template: ChatTemplate = field(default_factory=ChatTemplate)
    kind: str = "TokenizersBackend"
    overrules: bool = False

    def load(self) -> "Tokenizer":
        """The tokenizer, without truncation and padding: one for all callers of a process, who leave it as it is."""
        return _loaded(str(self.saved / _FILE), self.splits_special, self.digest)

    def remarks(self, *, converses: bool) -> tuple[str, ...]:
        """Lines about unexpected properties of it; `converses`: it is used for conversations."""
        found = []
        if self.overrules:
            found.append(
                f"{self.kind}, by which AutoTokenizer reads {self.folder}: its tokenizer.json alone makes other tokens"
            )
        if converses and self.template.name == BUILT_IN:
            found.append(f"it has no chat template: conversations are written in {BUILT_IN}")
        return tuple(found)


@lru_cache(maxsize=4)
def _loaded(file: str, splits_special: bool, digest: str) -> "Tokenizer":
    """Load a tokenizer, once for its `digest`. tokenizers 0.23 does not free the words that it remembers of one: a
    process that loaded it for each MB of text grew by 4 MB with each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.encode_special_tokens = splits_special
    return tokenizer


def find_tokenizer(
    name: str,
    *,
    model: str,
    corpus: Sequence[FileList],
    root: Path,
    progress: Progress | None = None,
    bos: Bos = "auto",
) -> TokenizerInfo:
    """The tokenizer for `tokenizer.name_or_path: name`, built in the cache at `root` if necessary.

    `corpus` is the training text of `train:N`, `bos` is `data.bos`. Raises `UserError` if there is no such tokenizer,
    it has no EOS, or it has no BOS and one is requested.
    """
    if name == "byte":
        found = _ours(_cached(root, ["byte"], lambda folder: _save(_byte_tokenizer(), folder)), root)
    elif name.startswith("train:"):
        found = _ours(_trained(name, corpus, root, progress), root)
    else:
        folder = _folder_of(model, auto=True) if name == "auto" else _folder_of(name, auto=False)
        origin = model if name == "auto" else name
        found = _inspect(folder, root, "" if expanded(origin).exists() else origin)
    return _with_bos(found, bos)


def put_bos(ids: list[int], bos_token_ids: tuple[int, ...]) -> list[int]:
    return [*missing_bos(ids, bos_token_ids), *ids]


def missing_bos(ids: list[int], bos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """BOS, if a text with these tokens lacks it: a text that begins with it (a rendered chat) gets no second one.

    A text without tokens stays empty: BOS and EOS alone would teach that a text ends at once.
    """
    return () if not ids or tuple(ids[: len(bos_token_ids)]) == bos_token_ids else bos_token_ids


@contextmanager
def encoding(folder: Path, tokenizer: "Tokenizer", texts: Sequence[str]) -> Iterator[None]:
    """Inside, raise `UserError` if the tokenizer of `folder` fails on one of `texts`, naming the text."""
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        wrong = next((text for text in texts if _fails(tokenizer, text)), texts[0])
        raise UserError(
            f"the tokenizer in {folder} fails at the text {shortened(repr(wrong), 60)}: {first_line(error)}",
            fix="leave that text out, or name another tokenizer",
            more=_MORE,
        ) from error


def _is_of_library(error: BaseException) -> bool:
    """True if `tokenizers` raised it: a bare Exception, or a Rust panic, which is not an Exception."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _fails(tokenizer: "Tokenizer", text: str) -> bool:
    try:
        tokenizer.encode(text)
    except BaseException as error:
        return _is_of_library(error)
    return False


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
        files = [path for path in sorted(beside.rglob("*")) if path.is_file()]
        checksums = {str(path.relative_to(beside)): file_checksum(path) for path in files}
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


def tokenizer_files(folder: Path, patterns: Sequence[str] = TOKENIZER_FILES) -> list[Path]:
    """The files of a tokenizer in a folder: vocabularies, settings and chat templates; no code, and none that is hidden
    or holds weights, whatever its name begins with."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not path.name.startswith(".") and path.suffix not in _NO_VOCABULARY)


def _folder_of(name: str, *, auto: bool) -> Path:
    path = expanded(name)
    if path.is_file():
        check_not_gguf(path)
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        if not is_hub_id(name):
            what = f"the model {name!r} comes without a tokenizer" if auto else f"no folder {name!r}"
            raise _no_tokenizer(what, auto)
        # Requested even if there is a local copy, which may lack the templates.
        folder = snapshot(name, [*TOKENIZER_FILES, *_SETTINGS], key=MODEL if auto else "tokenizer.name_or_path")
    if not tokenizer_files(folder, _VOCABULARIES):
        where = f"{name!r} on the hub" if is_hub_id(name) else folder
        raise _no_tokenizer(f"{where} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...)", auto)
    return folder


def _no_tokenizer(what: str, auto: bool) -> UserError:
    key = "tokenizer.name_or_path" + (" (auto: the model's own)" if auto else "")
    return UserError(f"{key}: {what}", fix="tokenizer.name_or_path=byte, or train:8192", more=_MORE)


def _inspect(folder: Path, root: Path, hub_id: str) -> TokenizerInfo:
    """The result of `AutoTokenizer` for a folder, cached by its files' contents and the versions of the libraries.
    `hub_id`: the hub id that the folder is a copy of, or ""."""
    files = tokenizer_files(folder, [*TOKENIZER_FILES, *_SETTINGS])
    for file in files:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise _not_a_tokenizer(file, f"{size:,} bytes, and at most {_MOST_BYTES:,} are read")
    if folder / _CONFIG in files:
        read_folder_config(folder)  # AutoTokenizer reads it too, with worse error messages
    digests = {str(file.relative_to(folder)): file_digest(file, root) for file in files}
    versions = [version(package) for package in ("transformers", "tokenizers")]
    parts = ["read", _READ_VERSION, versions, digests, hub_id]
    read = _cached(root, parts, lambda beside: _read_apart(folder, beside, hub_id))
    facts = json.loads((read / tokenizer_probe.FACTS).read_text(encoding="utf-8"))
    eos, templates = facts["eos_token_id"], facts["chat_template"]
    if eos is None:
        raise UserError(
            f"the tokenizer in {folder} has no EOS token, and every document must end with one",
            fix='add "eos_token" to its tokenizer_config.json',
            more=_MORE,
        )
    return TokenizerInfo(
        folder=folder,
        digest=key_of(*([facts["encoding"], facts["splits_special"]] if facts["encoding"] else [digests[_FILE]]), eos),
        vocab_size=facts["vocab_size"],
        eos_token_id=eos,
        template_ids=tuple(facts["template_ids"]),
        bos_token_id=facts["bos_token_id"],
        bos=facts["bos"] if facts["bos"].isprintable() else repr(facts["bos"]),
        saved=read,
        splits_special=facts["splits_special"],
        template=replace(
            ChatTemplate() if templates is None else ChatTemplate(templates, name=f"the chat template of {folder}"),
            special=facts["special"],
            tokens=tuple(facts["ends"]),
            stops=tuple(facts["stops"]),
        ),
        kind=facts["class"],
        overrules=facts["overrules"],
    )


def _read_apart(folder: Path, out: Path, hub_id: str) -> None:
    """Read a folder in another process with bounded memory: a file of a few hundred bytes can ask for all there is.
    Raises `UserError` if it cannot be loaded, or needs far more memory than its size suggests."""
    size = sum(file.stat().st_size for file in tokenizer_files(folder))
    most = _PROBE_BYTES + _PROBE_BYTES_A_BYTE * size
    command = [sys.executable, "-P", str(Path(tokenizer_probe.__file__)), str(folder), str(out), str(most), hub_id]
    apart = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, env=os.environ | apart, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, timeout=_PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _not_a_tokenizer(folder, f"a short text is not encoded within {_PROBE_SECONDS} s") from None
    if -done.returncode in _ENDED_FROM_OUTSIDE:
        raise RunFailed(
            f"{folder}: the process that tried it was ended by {signal.Signals(-done.returncode).name}",
            fix="start the command again",
        )
    if done.returncode:
        raise _not_a_tokenizer(folder, f"loading it and encoding a short text takes more than {most >> 20} MiB")
    if found := done.stdout.strip():
        raise _not_a_tokenizer(folder, found)


def _not_a_tokenizer(path: Path, why: object) -> UserError:
    fix = "copy its files from their origin again"
    if not find_spec("sentencepiece") and path.is_dir() and not (path / _FILE).is_file():
        fix += "; a *.model alone needs pip install sentencepiece protobuf"
    return UserError(f"{path}: not a tokenizer that AutoTokenizer reads: {why}", fix=fix, more=_MORE)


# Our two tokenizers: byte-level, so that every text is representable and decodes to itself.


def _ours(folder: Path, root: Path) -> TokenizerInfo:
    """The facts of a folder written by `_save`, which `AutoTokenizer` reads unchanged."""
    info = TokenizerInfo(folder, digest="", vocab_size=0, eos_token_id=0, saved=folder)
    tokenizer = info.load()
    eos = tokenizer.get_vocab(with_added_tokens=True)[EOS]
    return replace(
        info,
        digest=key_of(file_digest(folder / _FILE, root), eos),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_id=eos,
        template=ChatTemplate(special={"eos_token": EOS}),
    )


def _byte_tokenizer() -> "Tokenizer":
    """Token i is byte i; 256 is EOS."""
    return _byte_level({character: byte for byte, character in enumerate(_byte_characters())} | {EOS: _BYTES})


def _byte_characters() -> Iterator[str]:
    """The printable character of each byte, 0 to 255, in byte-level BPE (GPT-2): printable Latin-1 characters stand for
    themselves, the others for characters from 256 on."""
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
    """The first characters of evenly spaced files, each by its share of the text: the same in any format."""
    files = [(one.source, path, form) for one in corpus for path, form in one.files]
    files = files[:: -(-len(files) // _SAMPLE_FILES)]
    # Copies: the notes of a source belong to the later reading of its documents.
    files = [(source.unread(), path, form) for source, path, form in files]
    if len(files) > 1:
        sizes = [sum(len(plain(document)) for document in form.documents(path, source)) for source, path, form in files]
    else:
        sizes = [_SAMPLE_CHARACTERS]
    share = min(1.0, _SAMPLE_CHARACTERS / max(1, sum(sizes)))
    for (source, path, form), size in zip(files, sizes, strict=True):
        budget = int(size * share) + 1
        for document in form.documents(path, source):
            text = plain(document)
            yield text[:budget]
            budget -= len(text)
            if budget <= 0:
                break


def _save(tokenizer: "Tokenizer", folder: Path) -> None:
    # Not `save`: its errors, such as a full disk, are bare Exceptions.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
