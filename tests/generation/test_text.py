"""Text comes in whole characters, and what has come is what the tokens say."""

from typing import Any

import pytest

from fivefold.core.errors import UserError
from fivefold.data.tokenizer import find_tokenizer
from fivefold.generation.prompts import Answer, Prompt, _take
from fivefold.generation.text import StoppedText, TextStream, encode_prompt

TEXTS = ["plain words, no more", "naïve façade — “quoted”", "日本語"]
TEXTS += ["🙂👩‍👩‍👧 flags 🇩🇪", "  indented\n\ttabs \n"]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return find_tokenizer("byte", model="", corpus=(), root=tmp_path_factory.mktemp("cache")).load()


@pytest.fixture(scope="module")
def metaspace_tokenizer() -> Any:
    """Spaces are part of the tokens, and a leading one is dropped: Llama 2's way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(["plain words and more words", "no more quoted indented façade"], trainer)
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_tokenizer", "metaspace_tokenizer"])
def test_the_pieces_are_the_text(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text).ids
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_a_character_waits_until_it_is_whole(byte_tokenizer: Any) -> None:
    stream = TextStream(byte_tokenizer)
    assert [stream.push(byte) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
    assert stream.finish() == ""


def test_what_is_left_incomplete_is_shown_at_the_end(byte_tokenizer: Any) -> None:
    stream = TextStream(byte_tokenizer)
    assert [stream.push(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.finish() == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_up_what_follows(byte_tokenizer: Any) -> None:
    stream = TextStream(byte_tokenizer)
    ids = [0xFF, *b"abc", 0x80, *b"de"]
    text = "".join(stream.push(byte) for byte in ids) + stream.finish()
    assert text == byte_tokenizer.decode(ids)


def test_prompts(byte_tokenizer: Any) -> None:
    assert encode_prompt(byte_tokenizer, "ab", (256,)).tolist() == [[97, 98]]
    assert encode_prompt(byte_tokenizer, "", (256,)).tolist() == [[256]]
    assert encode_prompt(byte_tokenizer, "ab<|endoftext|>", (256,)).tolist() == [[97, 98]]
    assert encode_prompt(byte_tokenizer, "ab<|endoftext|><|endoftext|>", (256,)).tolist() == [[97, 98]]
    with pytest.raises(UserError, match="the prompt is empty"):
        encode_prompt(byte_tokenizer, "", ())


def test_a_text_ends_before_the_first_of_several_stops() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return "".join(("say ", "b and c")[each] for each in ids)

    stream = StoppedText(Words(), ("c", "b"))
    assert [stream.push(0), stream.push(1)] == ["say ", ""] and stream.is_over and stream.finish() == ""


def test_the_longest_beginning_of_a_stop_text_is_held_back(byte_tokenizer: Any) -> None:
    stream = StoppedText(byte_tokenizer, ("xyz", "END", "Nx"))
    assert [stream.push(token) for token in b"aENEND"] == ["a", "", "", "EN", "", ""]
    assert stream.is_over and stream.finish() == ""


def test_every_token_of_an_answer_is_counted(byte_tokenizer: Any) -> None:
    """The one that ends it among them, and those of a stop text, of which nothing is shown."""
    cases: list[tuple[tuple[str, ...], bytes, str, bool]] = [
        ((), b"ab", "ab", False), (("bc",), b"abc", "a", True), (("c", "d"), b"abd", "ab", True),
    ]  # fmt: skip
    for stop, tokens, text, is_over in cases:
        for end in ([], [256]) if not is_over else ([],):
            answer = Answer(StoppedText(byte_tokenizer, stop))
            ids = [*tokens, *end]
            ended = [_take([Prompt([1], {}, (256,), stop)], [answer], 0, token) for token in ids]
            assert ended == [*[False] * (len(ids) - 1), is_over or bool(end)]
            answer.parts.append(answer.stream.finish())
            assert (answer.text, answer.tokens, answer.is_over) == (text, len(ids), ended[-1])
