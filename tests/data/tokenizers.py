"""Folders of small tokenizers."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fivefold.data.tokenizer import _byte_characters


def byte_folder(where: Path, template: str, *, eos: str, special: tuple[str | AddedToken, ...] = ()) -> Path:
    """A token each byte, and special ones; with a chat template."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos, *special])
    where.mkdir(exist_ok=True)
    tokenizer.save(str(where / "tokenizer.json"))
    config = {"eos_token": eos, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (where / "tokenizer_config.json").write_text(json.dumps(config))
    return where
