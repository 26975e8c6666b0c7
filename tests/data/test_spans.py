"""What of a conversation is trained: each answer with what ends it, by the constructs of published templates.

Trained text stands in [[ ]], spelled out by hand.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from fivefold.core.errors import UserError
from fivefold.data.chat import CHATML, ChatTemplate
from fivefold.data.examples import Text

SPECIAL = {"bos_token": "<s>", "eos_token": "<eos>"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def read(source: str, turns: Sequence[Mapping[str, Any]], tokens: tuple[str, ...] = (), **given: Any) -> str:
    text, answers = ChatTemplate(source, SPECIAL, "the template", tokens).answers(turns, **given)
    found, at = "", 0
    for first, last in sorted(span for several in answers.values() for span in several):
        found += f"{text[at:first]}[[{text[first:last]}]]"
        at = last
    return found + text[at:]


TWO = [user("q1"), said("a1"), user("q2"), said("<b>a2")]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "abcdefghi", "name": "get"}
TOOL = {"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}
CALLS = [user("w?"), said("", tool_calls=[CALL]), RESULT, said("ok")]

# ---- the end of a turn that others follow ----------------------------------------------------------------------------

ENDS = {
    "EOS behind all, as Phi-3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|user|>\nq1<|end|>\n<|assistant|>\n[[a1<|end|>]]\n<|user|>\nq2<|end|>\n<|assistant|>\n[[<b>a2<|end|>\n<eos>]]",
    ),
    "EOS behind all, also in front of the generation prompt": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{{ eos_token }}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "<|user|>q1<|end|><|assistant|>[[a1<|end|>]]<|user|>q2<|end|><|assistant|>[[<b>a2<|end|><eos>]]",
    ),
    "the same without lines, as Phi-4-mini": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
        "<|user|>q1<|end|><|assistant|>[[a1<|end|>]]<|user|>q2<|end|><|assistant|>[[<b>a2<|end|><eos>]]",
    ),
    "the last answer ends otherwise, as OLMo": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}",
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n[[a1<|im_end|>]]\n<|im_start|>user\nq2<|im_end|>\n"
        "<|im_start|>assistant\n[[<b>a2<eos>]]",
    ),
    "and the answer begins behind a question for less, as gpt-oss": (
        "{%- for m in messages -%}\n{%- if m.role == 'assistant' -%}\n<|start|>assistant<|channel|>final<|message|>"
        "{{- m.content }}{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}\n"
        "{%- else -%}\n<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>\n{%- endif -%}\n{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}\n<|start|>assistant\n{%- endif -%}",
        "<|start|>user<|message|>q1<|end|><|start|>assistant[[<|channel|>final<|message|>a1<|end|>]]"
        "<|start|>user<|message|>q2<|end|><|start|>assistant[[<|channel|>final<|message|><b>a2<|return|>]]",
    ),
    "turns by their numbers": (
        "{%- for i in range(messages | length) -%}{%- set m = messages[i] -%}<{{ m.role }}>{{ m.content }}"
        "{{ '</s>' if i == messages | length - 1 else '<end>' }}{%- endfor -%}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        "<user>q1<end><assistant>[[a1<end>]]<user>q2<end><assistant>[[<b>a2</s>]]",
    ),
    "gone through twice; no question, as Mistral": (
        "{{ bos_token }}{% for m in messages[::-1] %}{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}"
        "{# {% for %} #}{% for m in messages %}{% for c in 'x' %}{% endfor %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        "<s>[INST] q1 [/INST][[ a1</s>]][INST] q2 [/INST][[ <b>a2</s>]]",
    ),
    "the end at the front of the next turn, as Jamba": (
        "{% for m in messages %}{{ '<end>' if not loop.first }}<{{ m.role }}>{{ m.content }}"
        "{{ '<end>' if loop.last and m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<end><assistant>{% endif %}",
        "<user>q1<end><assistant>[[a1<end>]]<user>q2<end><assistant>[[<b>a2<end>]]",
    ),
    "a question behind the last turn in any case, as Command A": (
        "{% for m in messages %}<start><{{ m.role }}>{{ '<say>' if m.role == 'assistant' }}{{ m.content }}<end>"
        "{% endfor %}<start><assistant>{% if add_generation_prompt %}<say>{% endif %}",
        "<start><user>q1<end><start><assistant><say>[[a1<end>]]<start><user>q2<end><start><assistant><say>"
        "[[<b>a2<end>]]<start><assistant>",
    ),
    "a question that begins to answer, as DeepSeek-R1": (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}",
        "<user>q1</s><assistant>[[a1</s>]]<user>q2</s><assistant>[[<b>a2</s>]]",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_answer_is_trained_with_its_end(name: str) -> None:
    source, expected = ENDS[name]
    assert read(source, TWO) == read(source, TWO, tuple(re.findall("<.*?>", expected))) == expected
    # The same answers, each alone, and among many.
    text, answers = ChatTemplate(source, SPECIAL).answers([*TWO[:2] * 9, *TWO])
    trained = re.findall(r"\[\[(.*?)\]\]", expected, re.DOTALL)
    assert [text[slice(*answers[number][0])] for number in range(1, 22, 2)] == [trained[0]] * 10 + trained[1:]
    # And where the last turn is another's.
    text, answers = ChatTemplate(source, SPECIAL).answers([*TWO[:2], {"role": "tool", "content": "1"}])
    assert text[slice(*answers[1][0])] == trained[0]


def test_an_answer_begins_and_ends_where_its_own_turn_does(subtests: pytest.Subtests) -> None:
    said_turn = "{% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }}{{ m.content }}{% endfor %}"
    cases: dict[str, tuple[str, list[dict[str, Any]], str]] = {
        "a question that counts, of as many answers as are each asked for": (
            "{% for m in messages %}{{ '<a%d>' % loop.index0 if m.role == 'assistant' else '<u>' }}{{ m.content }}"
            "{% endfor %}{% if add_generation_prompt %}<a{{ messages | length }}>{% endif %}",
            TWO * 2, "<u>q1<a1>[[a1]]<u>q2<a3>[[<b>a2]]<u>q1<a5>[[a1]]<u>q2<a7>[[<b>a2]]",
        ),
        "behind a turn that is left out, a template that ends with the next user": (
            "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{{ '<user>' if messages[-1].role == 'assistant' }}{% if add_generation_prompt %}<assistant>{% endif %}",
            [*TWO[:2], RESULT, *TWO[2:]], "<user>q1<assistant>[[a1]]<user>q2<assistant>[[<b>a2<user>]]",
        ),
        "an end at the front of the next turn, of turns that have one": (
            "{% for m in messages %}{{ '<end>' if not loop.first }}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
            "{% if add_generation_prompt %}<end><assistant>{% endif %}",
            TWO, "<user>q1<end><end><assistant>[[a1<end>]]<end><user>q2<end><end><assistant>[[<b>a2<end>]]",
        ),
        "an end that is no question, for that comes behind it": (
            said_turn + "<a>{% if add_generation_prompt %}<a>{% endif %}", TWO, "<u>q1<a>[[a1]]<u>q2<a>[[<b>a2<a>]]",
        ),
    }  # fmt: skip
    for name, (source, turns, expected) in cases.items():
        with subtests.test(msg=name):
            assert read(source, turns) == expected


def test_what_is_thought_is_asked_for_as_it_was_before_the_next_question() -> None:
    """As Qwen3: thoughts of the turns since the last question are written, so a later question changes what was."""
    source = (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if loop.index0 > ns.last and m.thought %}<think>{{ m.thought }}</think>{% endif %}{{ m.content }}<end>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [user("q1"), said("a1", thought="t1"), said("a2", thought="t2"), user("q2"), said("a3", thought="t3")]
    assert read(source, turns) == (
        "<|user|>q1<end><|assistant|>[[a1<end>]]<|assistant|>[[a2<end>]]<|user|>q2<end>"
        "<|assistant|>[[<think>t3</think>a3<end>]]"
    )
    tools_before_the_last = (  # as Mistral, which writes them in front of the last question alone
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if loop.index0 == messages | map(attribute='role') | list | length - 2 or loop.last %}[TOOLS]{% endif %}"
        "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert read(tools_before_the_last, TWO) == "[INST]q1[/INST][[a1</s>]][TOOLS][INST]q2[/INST][[<b>a2</s>]]"


def test_the_assistant_may_begin_behind_what_a_text_begins_with() -> None:
    llama = (
        "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|' + m.role + '|>\n\n' + m.content | trim + "
        "'<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}"
    )
    turns = [said(" hello "), user("q"), said("a")]
    assert read(llama, turns) == "<s><|assistant|>\n\n[[hello<|eot|>]]<|user|>\n\nq<|eot|><|assistant|>\n\n[[a<|eot|>]]"
    assert read(llama, [{"role": "system", "content": "s"}, *turns[:1]]) == (
        "<s><|system|>\n\ns<|eot|><|assistant|>\n\n[[hello<|eot|>]]"
    )
    alternate = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    with pytest.raises(UserError, match="the template does not take the conversation: user first"):
        read(alternate, turns)


# ---- answers that the marker of the next turn ends -------------------------------------------------------------------

GLM = (  # as GLM-4.5
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>{{ '\n' + m.content if m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}"
    "{{ '\n' + m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "</think>", "<tool_call>", "</tool_call>", "<|u")


def test_an_answer_that_its_template_does_not_end_ends_with_the_marker_of_the_next_turn() -> None:
    start = "[gMASK]<sop><|user|>\n"
    assert read(GLM, TWO, MARKS) == (
        f"{start}q1<|assistant|>[[\n<think></think>\na1<|user|>]]\nq2<|assistant|>[[\n<think></think>\n<b>a2]]"
    )
    assert read(GLM, CALLS, MARKS, tools=[TOOL]) == (
        f"{start}w?<|assistant|>[[\n<think></think>\n<tool_call>get</tool_call><|observation|>]]\n1"
        "<|assistant|>[[\n<think></think>\nok]]"
    )
    told = [*TWO[:2], {"role": "system", "content": "s"}]
    assert read(GLM, told, MARKS).endswith("\na1<|system|>]]\ns")
    assert read(GLM, TWO).count("<|user|>]]") == 0  # a marker that is no token
    assert read(GLM, [*TWO[:2], user("")], MARKS).endswith("\na1]]<|user|>\n")  # the text would end with the answer
    in_a_row = [*TWO[:2], said("a2"), user("q2")]
    assert read(GLM, in_a_row, MARKS).endswith("\na1]]<|assistant|>[[\n<think></think>\na2<|user|>]]\nq2")
    text, answers = ChatTemplate(GLM, SPECIAL, "", MARKS).answers([*TWO[:2] * 9, *TWO])  # among many
    assert [text[: answers[at][0][1]].endswith("<|user|>") for at in range(1, 20, 2)] == [True] * 9 + [True]


def test_the_space_in_front_of_the_marker_leads_to_it(subtests: pytest.Subtests) -> None:
    lines = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    lines += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    last_alone = lines + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    one = lines.replace("<|{{ m.role }}|>", "<s>{{ m.role }}:").replace("<|assistant|>", "<s>assistant:")
    by_call = (  # what ends an answer ends no call
        "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}<{{ m.role }}>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{{ '<end>' if not m.tool_calls }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    cases = [
        (lines, TWO, MARKS, "<|user|>q1\n<|assistant|>[[a1\n<|user|>]]q2\n<|assistant|>[[<b>a2]]\n"),
        (last_alone, TWO, MARKS, "<|user|>q1\n<|assistant|>[[a1\n<|user|>]]q2\n<|assistant|>[[<b>a2\n<eos>]]"),
        (one, TWO, ("<s>",), "<s>user:q1\n<s>assistant:[[a1\n<s>]]user:q2\n<s>assistant:[[<b>a2]]\n"),
        (
            by_call,
            CALLS,
            ("<end>", "<result>"),
            "<user>w?<end><assistant>[[get<result>]]1</result><assistant>[[ok<end>]]",
        ),
        (  # unless a token ends it
            by_call.replace("'<end>' if not m.tool_calls", "'<call>' if m.tool_calls else '<end>'"),
            CALLS,
            ("<end>", "<call>", "<result>"),
            "<user>w?<end><assistant>[[get<call>]]<result>1</result><assistant>[[ok<end>]]",
        ),
    ]
    for source, turns, tokens, expected in cases:
        with subtests.test(msg=expected):
            assert read(source, turns, tokens) == expected


def unlike(text: str) -> list[str]:
    """The line about a first end that the last one does not begin with, in a text with [[ ]]."""
    ends = [each.strip() for each in re.findall(r"((?:<[^<>]*>\s*)+)\]\]", text)]
    line = f"it ends an answer by {ends[0]}, unlike the last: a server stops there if eos_token_id in "
    return [] if ends[-1].startswith(ends[0]) else [f"{line}generation_config.json names it"]


def test_what_ends_answers_is_said(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.chat.MOST_SECONDS", 0.5)
    outside = (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    )
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    untrained = "the end of an answer that another turn follows is not trained: it writes none"
    cases = {
        GLM: ["it ends an answer by the marker of the next turn, <|user|>: a server stops there if eos_token_id in "
              "generation_config.json names it"],
        bare: [f"{untrained}; write {{{{ eos_token }}}} there"],
        outside: [f"{untrained}; put it into {{% generation %}}"],
        CHATML.replace("im_", ""): [
            "it ends an answer by '<|end|>', which is no token: a server needs it as a stop string"
        ],
        CHATML.replace("<|im_end|>", "<end>"): [],
        "{{ messages | tojson }}": [],
        "{% for a in range(10 ** 5) %}{% for b in range(10 ** 5) %}{% endfor %}{% endfor %}": [],
        **{source: unlike(text) for source, text in ENDS.values()},
    }  # fmt: skip
    expected = dict(ENDS.values())
    for source, lines in cases.items():
        with subtests.test(msg=source):
            tokens = (*MARKS, *re.findall("<.*?>", expected.get(source, "<end>")))
            assert [*ChatTemplate(source, SPECIAL, "it", tokens).remarks()] == lines


# ---- calls of tools --------------------------------------------------------------------------------------------------

QWEN = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_ordinary_record_of_a_call() -> None:
    said_of_it = read(QWEN, CALLS, tools=[TOOL])
    assert said_of_it.startswith('<tools>{"type": "function", "function": {"name": "get"')
    assert said_of_it.partition("</tools>\n")[2] == (
        "<|im_start|>user\nw?<|im_end|>\n<|im_start|>assistant\n"
        '[[<call>{"name": "get", "arguments": {"a": 1}}</call><|im_end|>]]\n'
        "<|im_start|>user\n<result>1</result><|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nok<|im_end|>]]\n"
    )


def test_a_result_that_is_written_within_the_turn_that_called_is_not_trained() -> None:
    inline = (  # as Gemma 4
        "{% for m in messages %}{% if m.role != 'tool' %}{% set before = messages[loop.index0 - 1] %}"
        "{% if loop.first or before.role != 'tool' %}<turn>{{ m.role }}\n{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}<result>{% endfor %}"
        "{% set n = loop.index0 %}"
        "{% for r in messages[n + 1:n + 2] %}{% if r.role == 'tool' %}{{ r.content }}</result>{% endif %}{% endfor %}"
        "{% if not m.tool_calls %}</turn>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<turn>assistant\n{% endif %}"
    )
    assert read(inline, CALLS) == (
        "<turn>user\nw?</turn>\n<turn>assistant\n[[<call>get<result>]]1</result>[[ok</turn>]]\n"
    )


def test_arguments_are_what_the_template_takes() -> None:
    as_text = QWEN.replace("call.function | tojson", "call.function.name + call.function.arguments")
    assert '[[<call>get{"a": 1}</call><|im_end|>]]' in read(as_text, CALLS)
    given = [{**CALLS[1], "tool_calls": [{**CALL, "function": {"name": "get", "arguments": '{"a": 1}'}}]}]
    assert read(as_text, [CALLS[0], *given, *CALLS[2:]]) == read(as_text, CALLS)
    call = {**CALL, "function": {"name": "get", "arguments": {"a": "é"}}}
    assert '<call>get{"a": "é"}</call>' in read(as_text, [CALLS[0], said("", tool_calls=[call])])


def test_an_answer_that_is_not_written_is_no_empty_answer(subtests: pytest.Subtests) -> None:
    named_elsewhere = QWEN.replace("<call>{{ call.function | tojson }}</call>", "")
    drops = CHATML.replace("message['content']", "(message['content'] if message['role'] == 'user' else '')")
    thinks = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    cases: list[tuple[str, list[dict[str, Any]], str]] = [
        (named_elsewhere, CALLS, "turn 2 calls the tool 'get', and the template leaves out tool_calls"),
        (CHATML, [user("q"), said("I call get", tool_calls=[CALL])], "turn 2 calls the tool 'get'"),
        (  # the first of two calls alone, as Llama 3.1
            QWEN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            [user("q"), said("", tool_calls=[CALL, {**CALL, "function": {"name": "put", "arguments": {}}}])],
            "turn 2 calls the tool 'put'",
        ),
        (drops, TWO, "the template writes nothing of what the assistant says in turn 2 of 4"),
        (thinks, [*TWO, user("q"), said("<think>all of it</think>")], "writes nothing of .* in turn 6 of 6"),
    ]
    for source, turns, why in cases:
        with subtests.test(msg=why), pytest.raises(UserError, match=why):
            read(source, turns, tools=[TOOL])
    assert read(CHATML, [user("q"), said("")]).endswith("assistant\n[[<|im_end|>]]\n")  # which says so itself


def test_what_is_not_told_is_refused(subtests: pytest.Subtests) -> None:
    cases = {
        "{% for m in messages %}{{ m.content | length }}{% endfor %}": "writes nothing of what the assistant says",
        "{{ messages | tojson }}": "does not write turn after turn",
        CHATML.replace("in messages", "in messages|reverse"): "does not write turn after turn",
        CHATML.replace("in messages", "in messages[::-1]"): "does not write turn after turn",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}": (
            "does not tell where the assistant's turn 2 of 4 begins and ends"
        ),
        # Questions are not written, and how many turns there are is.
        "{{ messages | length }}{% for m in messages if m.role == 'assistant' %}<a>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}": (
            "does not tell where the assistant's turn 2 of 4 begins and ends"
        ),
        # Three blocks for two answers, in no loop.
        "{% generation %}{{ messages[1].content }}{% endgeneration %}{{ messages[2].content }}{% generation %}"
        "{{ messages[3].content }}{% endgeneration %}{% generation %}</s>{% endgeneration %}": (
            "does not write turn after turn"
        ),
    }
    for source, why in cases.items():
        with subtests.test(msg=source), pytest.raises(UserError, match=why):
            read(source, TWO)


# ---- {% generation %} ------------------------------------------------------------------------------------------------


def test_what_a_template_encloses_is_trained_also_in_several_parts() -> None:
    phi = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|end|>\n{% endgeneration %}{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{%- if not add_generation_prompt -%}{%- generation -%}{{ eos_token }}{%- endgeneration -%}{%- endif -%}"
    )
    assert read(phi, TWO) == (
        "<|user|>\nq1<|end|>\n<|assistant|>\n[[a1<|end|>\n]]<|user|>\nq2<|end|>\n<|assistant|>\n[[<b>a2<|end|>\n]][[<eos>]]"
    )
    _, answers = ChatTemplate(phi, SPECIAL).answers(TWO)
    assert [len(answers[number]) for number in (1, 3)] == [1, 2]
    by_hand = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    assert read(by_hand, TWO[:2]) == "q1[[a1]]"
    dashes = "{% for m in messages %}{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}"
    dashes += "{%- endgeneration -%}#{%- else -%}{{ m.content }}?{%- endif -%}{% endfor %}"
    assert read(dashes, TWO[:2]) == "q1?[[a1]]#"
    # Of several templates, that for the tools of the record.
    two = ChatTemplate({"default": CHATML, "tool_use": dashes}, SPECIAL)
    assert two.answers(TWO[:2], tools=[TOOL]) == ("q1?a1#", {1: [(3, 5)]})


TEMPLATES = Path(str(trl.__file__)).parent / "chat_templates"
needs_templates = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="this TRL has no templates")


@needs_templates
def test_what_templates_for_training_enclose_is_what_trl_trains(subtests: pytest.Subtests) -> None:
    counted = 0
    for path, turns in product(sorted(TEMPLATES.glob("[!n]*[!68]_training.jinja")), (TWO, CALLS)):
        template, tools = ChatTemplate(path.read_text(), SPECIAL, path.name), [TOOL] if turns is CALLS else None
        with subtests.test(msg=path.name, calls=turns is CALLS):
            try:
                text, answers = template.answers(turns, tools=tools)
            except UserError as refused:  # calls, of templates that have no place for them
                assert turns is CALLS and re.search(
                    "leaves out tool_calls|does not take the conversation", refused.what
                )
                continue
            is_by_parts = (
                "content'][0]['type']" in template.text() or "message['content'] | selectattr" in template.text()
            )
            theirs = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
            texts, enclosed = render_jinja_template(
                conversations=[theirs if is_by_parts else turns], tools=tools, chat_template=template.text(),
                return_assistant_tokens_mask=True, **SPECIAL,
            )  # fmt: skip
            assert (text, sorted(span for several in answers.values() for span in several)) == (texts[0], enclosed[0])
            counted += 1
    assert counted > 25


# What is trained of TWO, and of CALLS (None: the template has no place for calls), read by hand in the templates.
_THINK, _XML = (
    "\n</think>\n\n",
    "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
)
_JSON = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
BY_HAND: dict[str, tuple[str, str, str | None, str]] = {
    "cohere": ("a1<|END_OF_TURN_TOKEN|>", "<b>a2<|END_OF_TURN_TOKEN|>", None, ""),
    "cohere2": ("a1<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<b>a2<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", None, ""),
    "deepseek_r1_distill": ("a1<｜end▁of▁sentence｜>", "<b>a2<｜end▁of▁sentence｜>", None, ""),
    "deepseekv3": (
        "a1<｜end▁of▁sentence｜>", "<b>a2<｜end▁of▁sentence｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function'
        '<｜tool▁sep｜>get\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "ok<｜end▁of▁sentence｜>",
    ),
    "gemma": ("a1<end_of_turn>", "<b>a2<end_of_turn>", None, ""),
    "gemma3": ("a1<end_of_turn>", "<b>a2<end_of_turn>", None, ""),
    "gemma4": ("a1<turn|>", "<b>a2<turn|>", "<|tool_call>call:get{a:1}<tool_call|><|tool_response>", "ok<turn|>"),
    "gptoss": (
        "<|channel|>final<|message|>a1<|end|>", "<|channel|>final<|message|><b>a2<|return|>",
        ' to=functions.get<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>ok<|return|>",
    ),
    "idefics3": (" a1<end_of_utterance>", " <b>a2<end_of_utterance>", None, ""),
    "llama3": ("a1<|eot_id|>", "<b>a2<|eot_id|>", None, ""),
    "llama3_1": (
        "a1<|eot_id|>", "<b>a2<|eot_id|>", '{"name": "get", "parameters": {"a": 1}}<|eot_id|>', "ok<|eot_id|>",
    ),
    "llava_next": (" a1</s>", " <b>a2</s>", None, ""),
    "nemotron_3_nano": (
        "</think>a1<|im_end|>", "</think><b>a2<|im_end|>", f"</think>\n{_XML}\n<|im_end|>", "</think>ok<|im_end|>",
    ),
    "phi3": ("a1<|end|>", "<b>a2<|end|>\n<eos>", None, ""),
    "phi3_5": ("a1<|end|>", "<b>a2<|end|>\n<eos>", None, ""),
    "qwen2_5": ("a1<|im_end|>", "<b>a2<|im_end|>", _JSON, "ok<|im_end|>"),
    "qwen2_5_vl": ("a1<|im_end|>", "<b>a2<|im_end|>", None, ""),
    "qwen3": ("a1<|im_end|>", f"<think>\n{_THINK}<b>a2<|im_end|>", _JSON, f"<think>\n{_THINK}ok<|im_end|>"),
    "qwen3_5_nothink": ("a1<|im_end|>", "<b>a2<|im_end|>", f"{_XML}<|im_end|>", "ok<|im_end|>"),
    "qwen3_5_think": (
        "a1<|im_end|>", f"{_THINK}<b>a2<|im_end|>", f"{_THINK}{_XML}<|im_end|>", f"{_THINK}ok<|im_end|>",
    ),
    "qwen3_vl": ("a1<|im_end|>", "<b>a2<|im_end|>", _JSON, "ok<|im_end|>"),
    "smolvlm": (" a1<end_of_utterance>", " <b>a2<end_of_utterance>", None, ""),
}  # fmt: skip


@needs_templates
def test_published_templates_read_by_hand(subtests: pytest.Subtests) -> None:
    for name, trained in BY_HAND.items():
        with subtests.test(msg=name):
            template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL, name)
            text, answers = template.answers(TWO)
            assert tuple("".join(text[slice(*span)] for span in answers[number]) for number in (1, 3)) == trained[:2]
            if trained[2] is None:
                with pytest.raises(UserError, match=r"leaves out tool_calls|does not take the conversation"):
                    template.answers(CALLS, tools=[TOOL])
            else:
                text, answers = template.answers(CALLS, tools=[TOOL])
                assert (
                    tuple("".join(text[slice(*span)] for span in answers[number]) for number in (1, 3)) == trained[2:]
                )


# ---- contents, and what else a template is given ---------------------------------------------------------------------

IN_PARTS = (  # as SmolVLM
    "{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
EITHER = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}</s>{% endfor %}"
)


def test_contents_are_what_the_template_takes() -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    apart = [user(parts("q", "r")), said(parts("a"))]
    together = [user("qr"), said("a")]
    in_parts = "User: qr<end_of_utterance>\nAssistant:[[ a<end_of_utterance>]]\n"
    assert read(IN_PARTS, apart) == read(IN_PARTS, together) == in_parts
    assert read(EITHER, apart) == "<user>(q)(r)</s>[[<assistant>(a)</s>]]"
    assert read(EITHER, together) == "<user>qr</s>[[<assistant>a</s>]]"
    chatml = "<|im_start|>user\nqr<|im_end|>\n<|im_start|>assistant\n[[a<|im_end|>]]\n"
    assert read(CHATML, apart) == read(CHATML, together) == chatml
    written = "{% for m in messages %}{{ m.content }}{% endfor %}"  # of a list, what Python writes
    assert read(written, apart) == "qr[[a]]"
    first = EITHER.replace("{% for part in m.content %}({{ part.text }}){% endfor %}", "{{ m.content[0].text }}")
    assert read(first, apart) == "<user>qr</s>[[<assistant>a</s>]]"  # the second part would be lost


def test_what_else_a_record_gives_the_template() -> None:
    source = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n' + ('<no>' if thinks == 0 else '') }}{% endif")
    source = source.replace(
        "message['content']", "('<no>' if thinks == 0 and message.role[0] == 'a' else '') + message.content"
    )
    assert read(source, TWO[:2]) == "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n[[a1<|im_end|>]]\n"
    assert read(source, TWO[:2], chat_template_kwargs={"thinks": 0}) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n<no>[[a1<|im_end|>]]\n"
    )
    ends = CHATML + "{{ eos_token }}{% for m in messages if m.thought is defined %}{{ m.thought }}{% endfor %}"
    assert ChatTemplate(ends, SPECIAL).render(TWO[:1], chat_template_kwargs={"eos_token": "</e>"}).endswith("</e>")
    assert ChatTemplate(ends, SPECIAL).render([{**TWO[0], "thought": None}]).endswith("<|im_end|>\n<eos>")
    for own in ("chat_template", "messages", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(UserError, match=f"'{own}' is no variable that a record can set"):
            read(source, TWO, chat_template_kwargs={own: True})


def test_a_template_writes_the_day_that_it_is_told() -> None:
    source = "{{ strftime_now('%d %b %Y') }} {{ strftime_now( \"%Y-%m-%d\" ) }}|" + CHATML
    first = ChatTemplate({"default": source, "rag": "x"}).on(date(2024, 2, 29))
    assert first.render(TWO[:1]).partition("|")[0] == "29 Feb 2024 2024-02-29"
    assert first.digest != ChatTemplate({"default": source, "rag": "x"}).on(date(2024, 3, 1)).digest
    assert ChatTemplate(CHATML).on(date(2024, 2, 29)) == ChatTemplate(CHATML)


# ---- many turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EOS behind all, as Phi-3", "a question that begins to answer, as DeepSeek-R1"])
def test_a_long_conversation_is_written_a_few_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = ChatTemplate._write
    monkeypatch.setattr(ChatTemplate, "_write", lambda *given, **named: written.append(1) or write(*given, **named))
    counts = []
    for length in (50, 500):
        written.clear()
        _, found = ChatTemplate(ENDS[name][0], SPECIAL).answers(TWO[:2] * length)
        assert len(found) == length
        counts.append(len(written))
    assert counts[0] == counts[1] < 10


def test_many_answers_are_each_asked_for_by_what_the_turn_before_says() -> None:
    """Of more than a few answers one of a kind is asked for, and a key of a turn makes another kind."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ '<no>' if messages[loop.index0 - 1].quick }}"
        "{{ m.content }}</s>{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{{ '<no>' if messages[-1].quick }}{% endif %}"
    )
    turns = [user("q"), said("a"), {**user("r"), "quick": True}, said("b")]
    assert read(source, turns * 3) == "<u>q<a>[[a</s>]]<u>r<a><no>[[b</s>]]" * 3


def test_many_spans_and_many_tokens() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges = np.sort(rng.integers(0, 60, 8)).reshape(-1, 2)
        some = [(int(first), int(last)) for first, last in rng.permutation(edges)]
        tokens = np.sort(rng.integers(0, 64, (40, 2)))
        trained = Text("", tuple(some)).is_trained(tokens).tolist()
        begins = [min(begin, end - 1) for begin, end in tokens.tolist()]
        assert trained == [
            any(max(first, begin) < min(last, end) for first, last in some)
            for begin, end in zip(begins, tokens[:, 1].tolist(), strict=True)
        ]
