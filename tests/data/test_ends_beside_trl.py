"""Which tokens of conversations are trained, beside `return_assistant_tokens_mask` of templates for training.

Templates: those of TRL with their training twins, and those of families (`family_templates`). Each is held against the
twin, which has what the model writes in `{% generation %}`, with a tokenizer whose special tokens have each combination
of flags. What differs has a reason: of a kind (`KINDS`), or of a template (`OTHER_TEXT`, `REFUSED`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fivefold.core.errors import UserError
from fivefold.data.chat import ChatTemplate
from fivefold.data.examples import Example, Text, chat
from fivefold.data.store import StoreWriter
from fivefold.data.tokenizer import TokenizerInfo
from fivefold.data.windows import Encoder
from tests.data.family_templates import FAMILIES, untagged
from tests.tiers import put_off

FOLDER = Path(str(trl.__file__)).parent / "chat_templates"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="this TRL has no templates")

# ---- conversations and flags -----------------------------------------------------------------------------------------


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*names: str, **more: Any) -> dict[str, Any]:
    made = [
        {"type": "function", "id": f"{name}12345678"[:9], "function": {"name": name, "arguments": {"a": 1}}}
        for name in names
    ]
    return says("assistant", "", tool_calls=made, **more)


RESULT = says("tool", '{"t": 21}', tool_call_id="get123456", name="get")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name, "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "n"}}},
        },
    }
    for name in ("get", "put")
]  # fmt: skip
ROUND = [says("user", "What is it?"), says("assistant", "It is this.")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": ROUND,
    "several turns": [*ROUND, says("user", "And 2?"), says("assistant", "Two!\n\nYes"), *ROUND],
    "system": [says("system", "Be brief."), *ROUND, *ROUND],
    "a call": [ROUND[0], calls("get"), RESULT, ROUND[1], *ROUND],
    "calls in a row": [ROUND[0], calls("get"), RESULT, calls("put"), {**RESULT, "name": "put"}, ROUND[1]],
    "thoughts": [
        ROUND[0], says("assistant", "<think>\nhm\n</think>\n\nThis."), says("user", "2?"),
        says("assistant", "Two.", reasoning_content="so", thinking="so"),
    ],
    "edges": [
        says("user", ""), says("assistant", "\n \nVoilà — ünï 漢字🙂"), says("user", " \n"),
        says("assistant", "  a b. \n"), says("user", "?"), says("assistant", "é"),
    ],
    "the user last": [*ROUND, says("user", "And?")],
}  # fmt: skip
FLAGS: dict[str, dict[str, bool]] = {
    "special": {},
    "not special": {"special": False},
    "normalized": {"normalized": True},
    "rstrip": {"rstrip": True},
    "lstrip": {"lstrip": True},
    "lstrip rstrip": {"lstrip": True, "rstrip": True},
    "single_word": {"single_word": True},
    "rstrip single_word": {"rstrip": True, "single_word": True},
    "lstrip normalized": {"lstrip": True, "normalized": True},
    "rstrip normalized, not special": {"rstrip": True, "normalized": True, "special": False},
    "lstrip rstrip, not special": {"lstrip": True, "rstrip": True, "special": False},
    "single_word normalized, not special": {"single_word": True, "normalized": True, "special": False},
    # As Llama 3 and GPT-2: no token has the space in front of a word.
    "trimmed": {"trim_offsets": True},
    "rstrip trimmed": {"rstrip": True, "trim_offsets": True},
}

# ---- templates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`plain`: as a family has it; `training`: with what the model writes in `{% generation %}`."""

    name: str
    plain: str
    training: str
    eos: str = ""  # as the texts end, if it is not named


def _trl(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


# Of templates that TRL has no twin of: the outputs that the model writes.
_GEMMA_4 = (
    r"\{\{- '<\|channel>thought\\n' \+ thinking_text \+ '\\n<channel\|>' -\}\}",
    r"\{%- for tool_call in message\S* -%\}(?s:.*?)(?=\s*\{%- set ns\.prev_message_type = 'tool_call' -%\})",
    r"\{\{- captured_content -\}\}|\{\{- strip_thinking\(message\['content'\]\) -\}\}(?!(?s:.*)\{\{- captured_content)",
    r"\{\{- '<turn\|>\\n' -\}\}",
)
_LLAMA = (
    r"\{\{- message\['content'\] \| trim \+ '<\|eot_id\|>' \}\}", r"\{\{- \"<\|eot_id\|>\" \}\}",
    r"\{\{- '\{\"name\": \"'(?s:.*?)\"\}\" \}\}",
)  # fmt: skip


def _enclosed(name: str) -> str:
    """The template of that name with the outputs in `{% generation %}` where the assistant speaks."""
    source, is_llama = _trl(name), name.startswith("llama")
    source = source.replace("'+ message['content'] | trim", "' }}{{- message['content'] | trim")
    by = "message is defined and message['role'] == 'assistant'" if is_llama else "role is defined and role == 'model'"
    for output in _LLAMA if is_llama else _GEMMA_4:
        tagged = rf"{{%- if {by} -%}}{{%- generation -%}}\g<0>{{%- endgeneration -%}}{{%- else -%}}\g<0>{{%- endif -%}}"
        source = re.sub(output, tagged, source)
    return source


def _cases() -> Iterator[Case]:
    names = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
    for name in names:
        if (FOLDER / f"{name}_training.jinja").exists():
            yield Case(name, _trl(name), _trl(f"{name}_training"))
        elif "generation" in (source := _trl(name)) and "endgeneration" in source:
            yield Case(name, untagged(source), source)
        else:
            yield Case(name, _trl(name), _enclosed(name))
    for name, (source, eos) in FAMILIES.items():
        yield Case(name, untagged(source), source, eos)


CASES = {case.name: case for case in _cases()} if FOLDER.is_dir() else {}
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>", "<|return|>", "<|eot|>", "<|end_of_text|>", "<|end_of_turn|>",
)  # fmt: skip
_SPECIAL = re.compile(r"<[^<>\s=\"'{},/]{2,40}>|</(?:think|tool_call|s|arg_key|arg_value)>|\[/?[a-z]*[A-Z][A-Z_]+\]")

# ---- both masks ------------------------------------------------------------------------------------------------------


@cache
def _bytes() -> Tokenizer:
    """Bytes and merges of some, across the ends of words and lines."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    corpus = ["It is this.\n\n", "?\n", ">\n", "|>\n", ".\nWhat is it?\n"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(corpus, trainer)
    return made


def tokenizer_of(special: Sequence[str], eos: str, flags: Mapping[str, bool]) -> PreTrainedTokenizerFast:
    made = Tokenizer.from_str(_bytes().to_str())
    made.post_processor = processors.ByteLevel(trim_offsets=flags.get("trim_offsets", False))
    options = {"special": True, "normalized": False, **{name: flags[name] for name in flags.keys() - {"trim_offsets"}}}
    tokens = [AddedToken(token, **options) for token in special]
    (made.add_special_tokens if options["special"] else made.add_tokens)(tokens)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, bos_token="<s>")


def ours(text: Text, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool], list[Any]]:
    """Tokens, which of them are trained, and the characters of each, without an EOS that was appended."""
    parts = next(iter(Encoder(tokenizer.backend_tokenizer, with_spans=True).encode([text.text])))
    writer = StoreWriter(Path(), TokenizerInfo(Path(), "", len(tokenizer), tokenizer.eos_token_id), ())
    ids, marks = (np.concatenate(both) for both in zip(*writer._sequence(text, parts)[: len(parts)], strict=True))
    spans = np.concatenate([part.spans for part in parts])
    return ids.tolist(), [bool(mark) for mark in marks], spans.tolist()


def theirs(
    case: Case, example: Example, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[bool], list[Any], list[bool]]:
    """The same of `apply_chat_template`, with the characters as `tokenizers` counts them; and the mask that it would be
    if its spans ended at characters of tokens."""
    template = ChatTemplate(case.training, named(tokenizer.eos_token))
    turns, tools = template._in_form(example.turns), example.tools and list(example.tools)
    made = tokenizer.apply_chat_template(
        turns, tools=tools, chat_template=case.training, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )  # fmt: skip
    mask, is_placed = np.zeros(len(made["input_ids"]), bool), True
    for first, last in template._write(turns, tools)[1]:
        inside = [made.char_to_token(at) for at in range(first, last)]
        is_placed &= None not in (*inside[:1], *inside[-1:])
        if places := [at for at in inside if at is not None]:
            mask[min(places) : max(places) + 1] = True
    found = [bool(mark) for mark in made["assistant_masks"]]
    assert not is_placed or found == mask.tolist()
    return made["input_ids"], found, made["offset_mapping"], mask.tolist()


# ---- what differs, and why -------------------------------------------------------------------------------------------

SPACE = "theirs: the space behind what ends an answer, for which no server waits"
PROMPT = "theirs: the end of the generation prompt, which the model is given"
SWALLOWED = "theirs: a token of another turn, whose flags take in a space of the answer"
UNPLACED = (
    "of answers whose first or last character is in no token (`trim_offsets`), theirs are none, or all that follows"
)
BYTES = "ours: the last bytes of an answer's last character, of which `char_to_token` finds the first token"
RESULT = "ours: what the template leaves to the model around a result: the marker that ends a call, the next header"
_OPEN = len("<think>\n\n</think>\n\n")  # with which a prompt may begin an answer
RESULTS = ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")  # templates of that kind
OTHER_TEXT = {  # what the text of a training twin has that the template's own has not
    "deepseek_r1_distill": "thoughts of every turn",
    **dict.fromkeys(("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), "thoughts of every turn, empty ones too"),
    "glm4moe": "the marker of a next turn behind the last answer; ours has EOS there, which GLM's eos_token_id has too",
}
REFUSED = {  # why ours has no mask
    "does not take the conversation": "the template refuses it itself",
    "leaves out tool_calls": "an empty answer would be learnt in place of a call",
    "deepseekv3 does not tell where": "it writes a call behind a result without the beginning of calls",
}


@dataclass(frozen=True)
class Written:
    """A conversation by a template: `held` as ours, of the template or, if its training twin has another text, of the
    twin without its tags; `enclosed` of the twin. `prompts`: the generation prompts of its answers."""

    example: Example
    held: Text
    enclosed: Text
    prompts: tuple[str, ...]
    special: tuple[str, ...]
    eos: str
    has_other_text: bool


def write(case: Case, turns: list[dict[str, Any]]) -> Written:
    """Raises `UserError` where ours refuses the conversation."""
    example = chat("x", turns, tools=TOOLS if any("tool_calls" in turn for turn in turns) else None)
    texts = [rendered(ChatTemplate(source, named("<|endoftext|>")), example) for source in (case.plain, case.training)]
    eos = case.eos or next((end for end in _ENDS if end in texts[1]), "<|endoftext|>")
    special = tuple(sorted({*_SPECIAL.findall("".join(texts)), eos} - {"<s>"}))

    def template(source: str) -> ChatTemplate:
        return ChatTemplate(source, named(eos), case.name, special)

    own, twin = template(case.plain), template(case.training)
    has_other_text = texts[0] != texts[1]
    if has_other_text:
        check_answers(own, twin, example)
        own = template(untagged(case.training))
    places = [at for at, turn in enumerate(example.turns) if turn["role"] == "assistant"]
    prompts = tuple(rendered(own, example, at) for at in places)
    return Written(
        example, example.rendered(own, eos), example.rendered(twin, eos), prompts, special, eos, has_other_text
    )


def named(eos: str) -> dict[str, str]:
    return {"bos_token": "<s>", "eos_token": eos}


def rendered(template: ChatTemplate, example: Example, turns: int | None = None) -> str:
    """The text of a conversation, or of so many of its turns with a generation prompt."""
    return template.render(example.turns[:turns], tools=example.tools, answer=turns is not None)


def check_answers(own: ChatTemplate, twin: ChatTemplate, example: Example) -> None:
    """Of templates with other texts: each of our answers is the end of the twin's, after what the twin adds."""
    (text, ours), (other, theirs) = (each.answers(example.turns, tools=example.tools) for each in (own, twin))
    for number in ours:
        said, whole = (
            "".join(written[slice(*span)] for span in spans[number]).rstrip()
            for written, spans in ((text, ours), (other, theirs))
        )
        is_last = number == len(example.turns) - 1
        assert whole.removesuffix("<|user|>" if own.name == "glm4moe" and is_last else "").endswith(said)


def kinds(case: Case, written: Written, text: Text, flags: Mapping[str, bool]) -> Counter[str]:
    """The kinds of tokens that are trained by one of the two alone. Fails for a token that no kind explains."""
    tokenizer = tokenizer_of(written.special, written.eos, flags)
    ids, trained, own = ours(text, tokenizer)
    their_ids, their_trained, places, repaired = theirs(case, written.example, tokenizer)
    assert ids == their_ids
    unplaced = sum(one != other for one, other in zip(their_trained, repaired, strict=True))
    found = Counter({UNPLACED: unplaced} if unplaced else {})
    differ = [at for at in range(len(ids)) if trained[at] != repaired[at]]
    for _, run in groupby(enumerate(differ), key=lambda pair: pair[1] - pair[0]):
        group = [at for _, at in run]
        for is_ours, some in groupby(group, key=lambda at: trained[at]):
            tokens = [*some]
            said = text.text[own[tokens[0]][0] : own[tokens[-1]][1]]
            is_behind, is_before = trained[tokens[0] - 1], tokens[-1] + 1 < len(ids) and trained[tokens[-1] + 1]
            if is_ours and all(places[at][0] == places[at][1] for at in tokens):
                kind = UNPLACED
            elif is_ours and all(places[at] == places[at - 1] for at in tokens):
                kind = BYTES
            elif is_ours and case.name in RESULTS and re.fullmatch(r"<\|tool_response>|<\|turn>model\n?", said):
                kind = RESULT
            elif not is_ours and is_behind and not said.strip():
                kind = SPACE
            elif (
                not is_ours
                and is_before
                and any(said.strip() in prompt[-len(said) - _OPEN :] for prompt in written.prompts)
            ):
                kind = PROMPT
            elif not is_ours and len(tokens) == 1 and [*places[tokens[0]]] != own[tokens[0]]:
                kind = SWALLOWED
            else:
                kind = f"{case.name}: {said!r} is trained by {'ours' if is_ours else 'theirs'} alone"
            found[kind] += len(tokens)
    return found


EXPLAINED = {SPACE, PROMPT, SWALLOWED, UNPLACED, BYTES, RESULT}


def held(case: Case, conversations: Sequence[str], flags: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Counts of comparisons (equal, different, of another text, refused), and of tokens by their kind."""
    counts, tokens = Counter[str](), Counter[str]()
    for name in conversations:
        try:
            written = write(case, CONVERSATIONS[name])
        except UserError as error:
            assert any(why in error.what for why in REFUSED), error.what
            counts["refused"] += len(flags)
            continue
        assert not written.has_other_text or case.name in OTHER_TEXT
        for flag in flags:
            both = [kinds(case, written, text, FLAGS[flag]) for text in (written.held, written.enclosed)]
            counts["equal" if not any(both) else "explained"] += 1
            tokens += sum(both, Counter())
    assert tokens.keys() <= EXPLAINED, tokens.keys() - EXPLAINED
    return counts, tokens


CORE = (("several turns", "a call", "edges"), ("lstrip", "rstrip trimmed"))
ALL = (tuple(CONVERSATIONS), tuple(FLAGS))


@pytest.mark.parametrize(
    ("conversations", "flags"), [pytest.param(*CORE, marks=pytest.mark.full), put_off(*ALL)], ids=["core", "all"]
)
def test_masks_are_those_of_templates_for_training(
    conversations: Sequence[str], flags: Sequence[str], subtests: pytest.Subtests
) -> None:
    counts, tokens = Counter[str](), Counter[str]()
    for case in CASES.values():
        with subtests.test(msg=case.name):
            some, of_kinds = held(case, conversations, flags)
            counts, tokens = counts + some, tokens + of_kinds
    print(dict(counts), *(f"{number:,} tokens, {kind}" for kind, number in tokens.most_common()), sep="\n")
    assert len(CASES) >= 60 and counts["equal"] and set(tokens) == EXPLAINED
