"""A long text is encoded in windows: the tokens, and where they end, are those of the whole text."""

import json
from collections.abc import Callable, Iterator
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from fivefold.data import prepare, windows
from fivefold.data.tokenizer import EOS, _byte_tokenizer
from tests.data import tokenizers_zoo as zoo
from tests.data.helpers import config_for
from tests.data.test_preferences import config

WORDS = ["the", " of", " and", "Hello", " world", ", ", ". ", "x=1;", "don't", "é", " 漢字", "\U0001f600", "e\u0301"]
SPECIAL = ["<|endoftext|>", "<s>", " <s> ", "<tool>"]
RUNS = [" ", "\n", "\r\n", "a", "ab", "=", "7", "\t", "<s>", "\U0001f600"]


def text_of(seed: int, characters: int = 3_001) -> str:
    """Words, special tokens, and runs that are longer than what small windows share."""
    rng = np.random.default_rng(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < characters:
        kind = rng.random()
        if kind < 0.9:
            parts += rng.choice([*WORDS, *SPECIAL[:2]], rng.integers(1, 40)).tolist()
        elif kind < 0.95:
            parts.append(str(rng.choice(RUNS)) * int(rng.integers(2, 500)))
        else:
            parts.append(str(rng.choice(SPECIAL)))
    return "".join(parts)


def llama(*, prepends: bool, splits: bool = False) -> Tokenizer:
    """As Llama 2's and Gemma's: the whole text is one word."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] * prepends + [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")  # or training takes the text for one word
    made.train_from_iterator(
        [text_of(seed) for seed in range(100, 110)],
        trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>"], show_progress=False, limit_alphabet=20),
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if splits else pre_tokenizers.Sequence([])
    return made


def stripping() -> Tokenizer:
    made = zoo.byte_bpe()
    made.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("of", single_word=True)])
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    return made


def spaces_in_one() -> Tokenizer:
    """As T5's: a normalizer makes one of many spaces."""
    made = zoo.unigram()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return made


def one_word_unigram() -> Tokenizer:
    made = zoo.unigram()
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return made


def split_by(*each: str) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        made = zoo.byte_bpe()
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in each]
        made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
        special, alphabet = ["<s>", "<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
        numbers = [f" {number:03}" for number in range(1000)]  # each a token
        trainer = trainers.BpeTrainer(
            vocab_size=1700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator([*numbers, text_of(99, 20_000)], trainer)
        return made

    return make


LLAMA_3 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte": _byte_tokenizer,
    "GPT-2": zoo.byte_bpe,
    "Qwen2": zoo.digits,
    "Llama 3": split_by(LLAMA_3),
    "digits from the right": split_by(r"(?=(\d{3})+(?!\d))| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    "Llama 2": lambda: llama(prepends=True),
    "Gemma": lambda: llama(prepends=False, splits=True),
    "tokens that strip": stripping,
    "Unigram": zoo.unigram,
    "T5": spaces_in_one,
    "Unigram of one word": one_word_unigram,
    "WordPiece": zoo.wordpiece,
}


def encoded(tokenizer: Any, text: str, *, with_spans: bool = False) -> tuple[int, list[int], list[tuple[int, int]]]:
    (parts,) = windows.Encoder(tokenizer, with_spans=with_spans).encode([text])
    ids = list(chain.from_iterable(part.ids.tolist() for part in parts))
    return len(parts), ids, [(first, last) for part in parts for first, last in part.spans.tolist()]


def own_characters(tokenizer: Any, text: str, encoding: Any) -> Iterator[tuple[int, int]]:
    """The characters of each token without the space that its flags take in."""
    added = tokenizer.get_added_tokens_decoder()
    for number, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        own = range(first, last)
        if number in added and added[number].lstrip:
            own = own[sum(1 for _ in takewhile(str.isspace, text[first:last])) :]
        if number in added and added[number].rstrip:
            own = own[: len(own) - sum(1 for _ in takewhile(str.isspace, text[first:last][::-1]))]
        yield own.start, own.stop


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, most = KINDS[kind](), 0
    for seed in range(12):
        text = text_of(seed)
        whole = tokenizer.encode(text, add_special_tokens=False)
        for step, shared in ((61, 64), (97, 128), (256, 48)):
            monkeypatch.setattr(windows, "_STEP", step)
            monkeypatch.setattr(windows, "_SHARED", shared)
            parts, ids, _ = encoded(tokenizer, text)
            assert ids == whole.ids, (seed, step)
            _, ids, spans = encoded(tokenizer, text, with_spans=True)
            assert (ids, spans) == (whole.ids, [*own_characters(tokenizer, text, whole)]), (seed, step)
            most = max(most, parts)
    assert most > 5 or kind == "Unigram of one word"


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_the_space_that_a_token_takes_in_is_none_of_its_characters(left: bool, right: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<e>", lstrip=left, rstrip=right)])
    assert encoded(tokenizer, "x <e> \n x", with_spans=True)[2] == [(0, 1), (2, 5), (8, 9)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_a_window_is_encoded_at_once(kind: str) -> None:
    tokenizer, lengths = KINDS[kind](), []

    class Counted:
        model, normalizer, pre_tokenizer = tokenizer.model, tokenizer.normalizer, tokenizer.pre_tokenizer

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            lengths.extend(map(len, texts))
            return tokenizer.encode_batch(texts, **options)

        encode_batch_fast = encode_batch

    rng = np.random.default_rng(0)
    text = "".join(rng.choice([*WORDS, "\n", "\n\n", " 1234", SPECIAL[0]], 50_000).tolist())
    parts, ids, _ = encoded(Counted(), text)
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    if kind != "Unigram of one word":
        assert 2 * parts == len(lengths) == 2 * -(-(len(text) - 2**11) // 2**16)
        assert max(lengths) == 2**16 + 2**11


def test_where_what_is_far_decides_the_whole_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits in threes from the right: windows that end three times so far apart cut a long number alike, wrongly."""
    monkeypatch.setattr(windows, "_STEP", 3 * 64)
    monkeypatch.setattr(windows, "_SHARED", 3 * 32)
    tokenizer, whole = KINDS["digits from the right"](), []
    for length in (1000, 1001, 1002):
        text = "n" * 300 + "1234567890" * (length // 10) + "7" * (length % 10) + "." + "end" * 100
        parts, ids, _ = encoded(tokenizer, text)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        whole.append(parts == 1)
    assert whole == [True, True, False]


def test_where_a_pattern_looks_far_the_whole_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is between two quotes, or outside of them, is known from the beginning alone."""
    tokenizer = split_by(r'"[^"]*"|\w+|\s+|[^\w\s"]+|"')()
    monkeypatch.setattr(windows, "_STEP", 256)
    monkeypatch.setattr(windows, "_SHARED", 64)
    rng, words = np.random.default_rng(0), ["the", "of", "and", "Hello", "world"]
    text = "".join(" ".join(rng.choice(words, 14 + at % 7).tolist()) + (' "' if at % 2 else '" ') for at in range(400))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)  # whose tokens cross spaces between quotes, and no others
    parts, ids, _ = encoded(tokenizer, text)
    assert parts == 1 and ids == tokenizer.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(windows, "looks_far", lambda _: False)
    assert encoded(tokenizer, text)[1] != ids


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASED = (  # of o200k and those after it: `A` and `a` stand for sets of letters
    r"[^\r\n\p{L}\p{N}]?[A]*[a]+END|[^\r\n\p{L}\p{N}]?[A]+[a]*END|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def cased(end: str, but: str = "") -> str:
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return CASED.replace("[A]", upper).replace("[a]", lower).replace("END", end)


# The patterns of published tokenizers, one after the other.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "GPT-2": (GPT_2,),
    "StarCoder": (r"\p{N}", GPT_2),
    "Falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]"),
    "CLIP": (r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",),
    "BLOOM": (r" ?[^(\s|[.,!?…。，、।۔،])]+",),
    "GPT-4": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s",
    ),
    "DBRX": (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "Qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "Qwen3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "o200k": (cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),),
    "Tiny Aya": (cased("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"),),
    "Mistral tekken": (cased("").replace("{1,3}", ""),),
    "Kimi K2": (r"[\p{Han}]+|" + cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", but=r"&&[^\p{Han}]"),),
    "DeepSeek LLM": (
        r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅḀ-ἕℂℇℊ-ℓＡ-Ｚａ-ｚ𐐀-𐑏𞤀-𞥃]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+",
    ),
    "DeepSeek V2": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    "DeepSeek V3": (
        r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "Youtu": ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+", cased("")),
    "SuperBPE": (r"(?=(\d{3})+(?!\d))| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
    "Poro": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r" ?[^(\s|[.,!?…。，、।۔،])]+"),
}  # fmt: skip
# What ends at a mark that may also begin a match, is cut by number, or goes from words to marks and back; and what is
# unknown.
NOT_KNOWN = (
    r'"[^"]*"|\w+|\s+', "<.*>", r"\w-|-\w", r"(\w)\1", "(a", r"\s+|", "", rf"{GPT_2}|{PUBLISHED['BLOOM'][0]}",
    rf"{PUBLISHED['DeepSeek V2'][3]}|{PUBLISHED['DeepSeek V3'][2]}",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_are_near(name: str) -> None:
    for pattern in PUBLISHED[name]:
        assert not looks_far(None, pre_tokenizers.Split(Regex(pattern), "isolated")), pattern


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tokens_of_published_patterns_are_those_of_the_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_STEP", 97)
    monkeypatch.setattr(windows, "_SHARED", 128)
    tokenizer, most = split_by(*PUBLISHED[name])(), 0
    rng = np.random.default_rng(1)
    signs = [*"aB1é.-'\"/漢。 \n", "\r\n", "  ", " x", "'s", "ab", "AB"]
    for seed in range(8):
        text = text_of(seed) + "".join(rng.choice(rng.choice(signs, 6), 1500).tolist()) + text_of(seed + 50, 500)
        parts, ids, _ = encoded(tokenizer, text)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, seed
        most = max(most, parts)
    assert most > 5


@pytest.mark.parametrize("pattern", NOT_KNOWN)
def test_what_is_not_known_to_be_near_is_far(pattern: str) -> None:
    assert not windows._NEAR.fullmatch(pattern) and not windows._NEAR.fullmatch(rf"\s+|{pattern}")


def looks_far(normalizer: Any, pre_tokenizer: Any) -> bool:
    made = Tokenizer(models.BPE())
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    return windows.looks_far(made)


def test_all_patterns_of_a_tokenizer_are_read() -> None:
    near, far = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.Split(Regex("<.*>"), "isolated")
    replace, both = normalizers.Replace(Regex('"[^"]*"'), "Q"), pre_tokenizers.Sequence
    assert looks_far(replace, None) and looks_far(replace, near) and looks_far(None, far)
    assert looks_far(normalizers.Sequence([normalizers.NFC(), replace]), None)
    assert looks_far(None, both([near, far])) and looks_far(None, both([far, near]))
    assert looks_far(None, pre_tokenizers.FixedLength(5))  # counts from the beginning
    assert not looks_far(None, None) and not looks_far(normalizers.NFC(), both([near, near]))
    assert not looks_far(normalizers.Replace("<.*>", "<.*>"), pre_tokenizers.Split("<.*>", "isolated"))  # are texts


@pytest.mark.parametrize("form", ["txt", "eos", "prompt", "chat", "preference"])
def test_the_store_is_that_of_whole_texts(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an EOS ends a text, or a part of it, too."""
    long, other = text_of(1, 9_001), text_of(2, 9_001)
    if form == "eos":
        texts = ["one" + 2_000 * f" two{EOS}", "one" + 2_000 * f"{EOS}two "]
        (path := tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'text': each})}\n" for each in texts))
    elif form == "txt":
        (path := tmp_path / "a.txt").write_text(long, encoding="utf-8")
    else:
        records = {
            "prompt": {"prompt": long, "completion": other},
            "chat": {"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": other}]},
            "preference": {"prompt": long[:99], "chosen": long, "rejected": other},
        }
        (path := tmp_path / "a.jsonl").write_text(2 * f"{json.dumps(records[form])}\n")
    options = {"tokenizer": "train:300", "validation": 0.1 if form in ("txt", "eos") else 0, "seq_length": 60_013}
    found = []
    for step in (2**16, 97):
        monkeypatch.setattr(windows, "_STEP", step)
        monkeypatch.setattr(windows, "_SHARED", 128)
        cache = tmp_path / str(step)
        asked = config(path, "dpo" if form == "preference" else "sft", **options)
        prepare(config_for(path, **options) if form == "eos" else asked, cache=cache)
        found.append({each.name: each.read_bytes() for each in cache.glob("stores/*/*")})
    assert found[0] == found[1]
    assert ("trained.bin" in found[0]) == (form not in ("txt", "eos"))
