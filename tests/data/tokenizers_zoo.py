"""Tokenizer folders in the shapes that published ones have, each made in a few lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "", " ", "  ", "a", " a", "a ", "Hello, world!", " The quick brown fox jumps over 13 lazy dogs. ", "12345",
    "3.14159", "1,000,000", "x = y+1;", "def f(x):\n    return x  # two  spaces\n", "\n", "\n\n", "a\n\n\nb", "\ttab",
    "\r\nwindows", "naïve café", "e\u0301 composed?", "Ａ ﬁ ² wide", "漢字かな", "Привет, мир", "مرحبا", "नमस्ते", "😀🤖",
    "\u200bzero", "\xa0nbsp", "don't can't I'll", "CamelCaseWords", "UPPER lower", "<s>", "</s>", "a <s> b </s> c",
    "<s>a", "a</s>", "<|endoftext|>", "x<|endoftext|>y", "x <|im_start|>user\nq<|im_end|>\n y",
    "<|im_start|> <|im_end|>", "<tool>", "a<tool>b", "[PAD][UNK][CLS]", "<unk>", "▁metaspace", "Ġbyte", "\x00\x01",
    "a" * 40, "ab " * 20, "http://example.org/?q=1&b=%20",
]  # fmt: skip
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2+2? "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And <s> 3+3?"},
    {"role": "assistant", "content": "6"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% for t in tools %}<tool>{{ t.function.name }}{% endfor %}" + CHATML
_CORPUS = [text for text in TEXTS if "<" not in text] * 3
Make = Callable[[Path], None]


def put(folder: Path, name: str, tree: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(tree if isinstance(tree, str) else json.dumps(tree))


def config(folder: Path, name: str = "PreTrainedTokenizerFast", **values: Any) -> None:
    put(folder, "tokenizer_config.json", {"tokenizer_class": name, "eos_token": "<|endoftext|>", **values})


def byte_bpe(special: tuple[str, ...] = ("<|endoftext|>",), vocabulary: int = 300) -> Tokenizer:
    """As GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def llama2(*, prepends: bool = True) -> Tokenizer:
    """As the tokenizer.json of Llama 2: a normalizer writes the spaces, and bytes stand for what is not there."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz.,!?0123456789",
    ]
    made = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)}, merges=[], unk_token="<unk>", fuse_unk=True,
            byte_fallback=True,
        )
    )  # fmt: skip
    steps = [normalizers.Prepend("▁")] * prepends + [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return made


def unigram() -> Tokenizer:
    """As T5's and ALBERT's."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        _CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return made


def wordpiece() -> Tokenizer:
    """As BERT's."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        _CORPUS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def saved(made: Tokenizer, folder: Path) -> None:
    made.save(str(folder / "tokenizer.json"))


def token(text: str, **flags: Any) -> dict[str, Any]:
    plain = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": text, **plain, **flags}


def _special(named: Callable[[Path], None], made: Callable[[], Tokenizer] = byte_bpe) -> Make:
    """Tokens that stand where `named` puts them and not in tokenizer.json."""

    def make(folder: Path) -> None:
        saved(made(), folder)
        config(folder)
        named(folder)

    return make


ADDED = {str(300 + n): token(text) for n, text in enumerate(("<|im_start|>", "<|im_end|>", "<tool>", "<s>"))}
SPECIAL: dict[str, Make] = {
    "none": lambda folder: None,
    "added_tokens_decoder": lambda folder: config(folder, added_tokens_decoder=ADDED),
    "added_tokens_decoder, bos": lambda folder: config(folder, added_tokens_decoder=ADDED, bos_token="<s>"),
    "not special, strips": lambda folder: config(
        folder, added_tokens_decoder={"300": token("<tool>", special=False, lstrip=True, rstrip=True, normalized=True)}
    ),
    "additional_special_tokens": lambda folder: config(
        folder, additional_special_tokens=["<|im_start|>", {"__type": "AddedToken", **token("<|im_end|>", rstrip=True)}]
    ),
    "extra_special_tokens, list": lambda folder: config(folder, extra_special_tokens=["<|im_start|>", "<|im_end|>"]),
    "extra_special_tokens, dict": lambda folder: config(
        folder, extra_special_tokens={"tool_token": "<tool>", "start_token": "<|im_start|>"}
    ),
    "a name of its own": lambda folder: config(folder, tool_token="<tool>"),
    "special_tokens_map.json": lambda folder: put(
        folder, "special_tokens_map.json",
        {"bos_token": "<|im_start|>", "eos_token": token("<|im_end|>"), "additional_special_tokens": ["<tool>"]},
    ),
    "added_tokens.json": lambda folder: put(folder, "added_tokens.json", {"<|im_start|>": 300, "<|im_end|>": 301}),
    "bos as a dict": lambda folder: config(
        folder, bos_token={"__type": "AddedToken", **token("<s>", lstrip=True)}, pad_token="[PAD]"
    ),
    "add_bos_token": lambda folder: config(folder, bos_token="<s>", add_bos_token=True, add_eos_token=True),
    "another eos": lambda folder: config(folder, eos_token="<|im_end|>"),
    "split_special_tokens": lambda folder: config(
        folder, split_special_tokens=True, additional_special_tokens=["<|im_start|>"]
    ),
    "no tokenizer_config.json, only the model's config": lambda folder: (
        (folder / "tokenizer_config.json").unlink(),
        put(folder, "config.json", {"model_type": "gpt2", "eos_token_id": 0}),
    ),
    "legacy typed tokens": lambda folder: config(
        folder, bos_token={"__type": "AddedToken", **token("<s>")}, unk_token={"__type": "AddedToken", **token("<unk>")}
    ),
}  # fmt: skip


def _of_class(made: Callable[[], Tokenizer], name: str, model: str | None = None, **values: Any) -> Make:
    def make(folder: Path) -> None:
        saved(made(), folder)
        config(folder, name, **values)
        if model:
            put(folder, "config.json", {"model_type": model})

    return make


def _files(name: str, model: str | None = None, **values: Any) -> Make:
    """A vocabulary in files of its own: vocab.json and merges.txt, or vocab.txt."""

    def make(folder: Path) -> None:
        made = wordpiece() if name.startswith("Bert") else byte_bpe()
        made.model.save(str(folder))
        config(folder, name, **values)
        if model:
            put(folder, "config.json", {"model_type": model})

    return make


def digits() -> Tokenizer:
    """As Qwen2's, whose pattern takes digits one by one."""
    made = byte_bpe()
    pattern = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return made


LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BERT = {"eos_token": "[SEP]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
CLASSES: dict[str, Make] = {
    "Llama 2, its class": _of_class(llama2, "LlamaTokenizer", "llama", **LLAMA, legacy=False),
    "Llama 2, legacy": _of_class(llama2, "LlamaTokenizer", "llama", **LLAMA, legacy=True),
    "Llama 2, Fast": _of_class(llama2, "LlamaTokenizerFast", "llama", **LLAMA),
    "Llama 2, no prefix space": _of_class(llama2, "LlamaTokenizer", "llama", **LLAMA, add_prefix_space=False),
    "Llama 2, any class": _of_class(llama2, "PreTrainedTokenizerFast", "llama", **LLAMA),
    "Llama 3: bytes under the class of Llama": _of_class(byte_bpe, "LlamaTokenizer", "llama", bos_token="<s>"),
    "Mistral": _of_class(llama2, "LlamaTokenizer", "mistral", **LLAMA),
    "Phi-3": _of_class(llama2, "LlamaTokenizer", "phi3", **LLAMA),
    "Gemma": _of_class(lambda: llama2(prepends=False), "GemmaTokenizer", "gemma", bos_token="<s>", eos_token="</s>"),
    "GPT-2": _of_class(byte_bpe, "GPT2Tokenizer", "gpt2"),
    "GPT-2 that prefixes a space": _of_class(byte_bpe, "GPT2Tokenizer", "gpt2", add_prefix_space=True),
    "GPT-NeoX": _of_class(byte_bpe, "GPTNeoXTokenizer", "gpt_neox"),
    "Qwen2": _of_class(digits, "Qwen2Tokenizer", "qwen2"),
    "Qwen2 of a file that is not": _of_class(byte_bpe, "PreTrainedTokenizerFast", "qwen2"),
    "Qwen3": _of_class(digits, "Qwen2Tokenizer", "qwen3", additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
    "an unknown class": _of_class(byte_bpe, "SomethingTokenizer", "llama"),
    "T5": _of_class(unigram, "T5Tokenizer", "t5", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", extra_ids=5),
    "Unigram, any class": _of_class(unigram, "PreTrainedTokenizerFast", eos_token="</s>"),
    "BERT": _of_class(wordpiece, "BertTokenizer", "bert", **BERT),
    "BERT, cased": _of_class(wordpiece, "BertTokenizer", "bert", **BERT, do_lower_case=False),
    "WordPiece, any class": _of_class(wordpiece, "PreTrainedTokenizerFast", **BERT),
    "vocab.json and merges.txt": _files("GPT2Tokenizer", "gpt2"),
    "vocab.json and merges.txt of Qwen2": _files("Qwen2Tokenizer", "qwen2"),
    "vocab.txt": _files("BertTokenizer", "bert", **BERT),
}


def chat_files(folder: Path) -> None:
    """A template, and one for tools beside it."""
    put(folder, "chat_template.jinja", CHATML)
    put(folder, "additional_chat_templates/tool_use.jinja", WITH_TOOLS)


def _template(put_it: Callable[[Path], None]) -> Make:
    def make(folder: Path) -> None:
        saved(byte_bpe(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<s>")), folder)
        config(folder, bos_token="<s>")
        put_it(folder)

    return make


def named(name: str, template: str) -> dict[str, str]:
    return {"name": name, "template": template}


TEMPLATES: dict[str, Make] = {
    "in the config": _template(lambda folder: config(folder, bos_token="<s>", chat_template=CHATML)),
    "a file": _template(lambda folder: put(folder, "chat_template.jinja", CHATML)),
    "a file above the config": _template(
        lambda folder: (config(folder, chat_template="NO"), put(folder, "chat_template.jinja", CHATML))  # type: ignore[func-returns-value]
    ),
    "a list": _template(
        lambda folder: config(
            folder, chat_template=[named("default", CHATML), named("tool_use", WITH_TOOLS)]
        )
    ),
    "a dict": _template(lambda folder: config(folder, chat_template={"default": CHATML, "tool_use": WITH_TOOLS})),
    "a list without tools": _template(
        lambda folder: config(
            folder, chat_template=[named("default", CHATML), named("rag", "NO")]
        )
    ),
    "a folder": _template(chat_files),
    "unk and a token of its own": _template(
        lambda folder: config(
            folder, tool_token="<tool>", unk_token="<unk>",
            chat_template="{{ tool_token }}{{ unk_token }}{{ eos_token }}" + CHATML,
        )
    ),
}  # fmt: skip
FOLDERS: dict[str, Make] = {
    **{f"special tokens: {name}": _special(make) for name, make in SPECIAL.items()},
    **{f"class: {name}": make for name, make in CLASSES.items()},
    **{f"template: {name}": make for name, make in TEMPLATES.items()},
}


def made(name: str, folder: Path) -> Path:
    """The folder of that name."""
    folder.mkdir(parents=True)
    FOLDERS[name](folder)
    return folder


def sentencepiece(folder: Path, kind: str, name: str, model: str, **values: Any) -> None:
    """A tokenizer.model (kind: bpe or unigram) without a tokenizer.json."""
    import sentencepiece  # type: ignore[import-not-found, unused-ignore]

    folder.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS), model_prefix=str(folder / "tokenizer"), vocab_size=400, model_type=kind,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, user_defined_symbols=["<tool>"],
    )  # fmt: skip
    config(folder, name, **values)
    put(folder, "config.json", {"model_type": model})
