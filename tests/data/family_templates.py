"""Chat templates in the constructs of families that TRL has no training template for, with what the model writes in
`{% generation %}`: the reference. Without the tags they are the families' own, cut down to what decides the ends of
answers.
"""

import re

_TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


def untagged(source: str) -> str:
    """The same template without `{% generation %}`, with the same control of space."""
    return _TAG.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)


def _turns(user: str, before: str, after: str, *, start: str = "", system: str = "", tool: str = "") -> str:
    """A template of a line for each role. `before`: the generation prompt; `after`: the end of an answer."""
    roles = [("user", user), ("system", system or user), ("tool", tool)]
    branches = "".join(
        f"{{% elif m.role == '{role}' %}}{text.replace('@', '{{ m.content }}')}" for role, text in roles if text
    )
    return (
        f"{start}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{before}{{% generation %}}{{{{ m.content }}}}"
        f"{after}{{% endgeneration %}}{branches}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{{% endif %}}"
    )


def _marked(start: str, mark: str, *, role: str = "", calls: str = "", space: str = "\n") -> str:
    """A template whose answers the next turn's marker ends: `mark`, with `ROLE` in it or `role` behind it."""
    name = "{{ {'user': 'user', 'system': 'system', 'tool': 'observation'}[m.role] }}"
    other, own = mark.replace("ROLE", name), (mark + role).replace("ROLE", "assistant")
    return (
        f"{start}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{own}{{% generation %}}"
        f"{space}{{{{ m.content }}}}{calls}{{% endgeneration %}}{{% else %}}"
        "{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
        f"{{% generation %}}{other}{{% endgeneration %}}{{% else %}}{other}{{% endif %}}{role.replace('ROLE', name)}"
        f"{space}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{own}{{% endif %}}"
    )


_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_IM = _turns(
    "<|im_start|>{{ m.role }}\n@<|im_end|>\n", "<|im_start|>assistant\n", f"{_CALLS}<|im_end|>\n",
    tool="<|im_start|>tool\n@<|im_end|>\n",
)  # fmt: skip

FAMILIES: dict[str, tuple[str, str]] = {  # the template, and its EOS
    "llama 2": (
        _turns("{{ bos_token }}[INST] @ [/INST]", "", " {{ eos_token }}", system="<<SYS>>\n@\n<</SYS>>\n\n").replace(
            "{% generation %}", "{% generation %} "
        ),
        "</s>",
    ),
    "mistral 0.1": (_turns("[INST] @ [/INST]", "", "</s>", start="<s>"), "</s>"),
    "mistral 0.3": (
        _turns(
            "[INST] @[/INST]", "",
            "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]"
            "{% endif %}</s>",
            start="<s>", tool='[TOOL_RESULTS] {"content": "@"}[/TOOL_RESULTS]',
        ).replace("{% generation %}", "{% generation %} "),
        "</s>",
    ),
    "mistral tekken": (
        _turns("[INST]@[/INST]", "", "</s>", start="<s>", system="[SYSTEM_PROMPT]@[/SYSTEM_PROMPT]"), "</s>",
    ),
    "zephyr": (_turns("<|{{ m.role }}|>\n@</s>\n", "<|assistant|>\n", "</s>\n"), "</s>"),
    "vicuna": (_turns("USER: @ ", "ASSISTANT:", "</s>", start="A chat. "), "</s>"),
    "openchat": (
        _turns("GPT4 Correct User: @<|end_of_turn|>", "GPT4 Correct Assistant: ", "<|end_of_turn|>", start="<s>"),
        "<|end_of_turn|>",
    ),
    "alpaca": (_turns("### Instruction:\n@\n\n", "### Response:\n", ""), "</s>"),
    "solar": (_turns("### User:\n@\n\n", "### Assistant:\n", "</s>\n"), "</s>"),
    "falcon": (
        _turns("{{ '\n\n' if not loop.first }}User: @", "\n\nFalcon:", "").replace(
            "{% generation %}", "{% generation %} "
        ),
        "<|endoftext|>",
    ),
    "falcon 3": (
        _turns(
            "<|{{ m.role }}|>\n@\n", "<|assistant|>\n",
            "{% if not loop.last %}\n<|endoftext|>\n{% else %}<|endoftext|>{% endif %}",
        ),
        "<|endoftext|>",
    ),
    "qwen 2": (_IM, "<|im_end|>"),
    "smollm 2": ("<|im_start|>system\nYou help.<|im_end|>\n" + _IM, "<|im_end|>"),
    "yi, EOS another": (_IM, "<|endoftext|>"),
    "internlm 2": ("<s>" + _IM, "</s>"),
    "olmo 2": (
        _turns(
            "<|{{ m.role }}|>\n@\n", "<|assistant|>\n", "{{ eos_token }}{% if not loop.last %}\n{% endif %}",
            start="<|endoftext|>",
        ),
        "<|endoftext|>",
    ),
    "granite 3": (
        _turns(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>@<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>", f"{_CALLS}<|end_of_text|>\n",
            tool="<|start_of_role|>tool_response<|end_of_role|>@<|end_of_text|>\n",
        ),
        "<|end_of_text|>",
    ),
    "phi 4": (
        _turns("<|im_start|>{{ m.role }}<|im_sep|>@<|im_end|>", "<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "phi 4 mini": (
        _turns("<|{{ m.role }}|>@<|end|>", "<|assistant|>", "<|end|>").replace(
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "{% if add_generation_prompt %}<|assistant|>{% elif messages[-1].role == 'assistant' %}{% generation %}"
            "{{ eos_token }}{% endgeneration %}{% else %}{{ eos_token }}{% endif %}",
        ),
        "<|endoftext|>",
    ),
    "command r": (
        _turns(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>", start="<BOS_TOKEN>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek 2": (
        _turns(
            "User: @\n\n", "Assistant:", "<｜end▁of▁sentence｜>", start="<｜begin▁of▁sentence｜>", system="@\n\n",
        ).replace("{% generation %}", "{% generation %} "),
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek r1": (
        _turns(
            "<｜User｜>@", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", start="<｜begin▁of▁sentence｜>", system="@",
        ).replace("prompt %}<｜Assistant｜>", "prompt %}<｜Assistant｜><think>\n"),
        "<｜end▁of▁sentence｜>",
    ),
    "jamba": (
        "<|startoftext|>{% for m in messages %}"
        "{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
        "{% generation %}<|eom|>{% endgeneration %}{% elif not loop.first %}<|eom|>{% endif %}<|bom|><|{{ m.role }}|> "
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% if loop.last %}<|eom|>{% endif %}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|eom|><|bom|><|assistant|> {% endif %}",
        "<|endoftext|>",
    ),
    "kimi 2": (
        _turns(
            "<|im_user|>user<|im_middle|>@<|im_end|>", "<|im_assistant|>assistant<|im_middle|>",
            "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.function | tojson }}<|tool_call_end|>{% endfor %}"
            "<|im_end|>",
            system="<|im_system|>system<|im_middle|>@<|im_end|>", tool="<|im_system|>tool<|im_middle|>@<|im_end|>",
        ),
        "<|im_end|>",
    ),
    # Answers without an end of their own.
    "glm 4": (_marked("[gMASK]<sop>", "<|ROLE|>", calls=_CALLS), "<|endoftext|>"),
    "baichuan 2": (_turns("<reserved_106>@", "<reserved_107>", ""), "</s>"),
    "a header of one token": (_marked("", "<|im_start|>", role="ROLE", calls=_CALLS), "<|endoftext|>"),
    "a line in front of the marker": (_turns("<|user|>@\n", "<|assistant|>", "\n"), "</s>"),
    "the marker of a result ends a call": (
        _turns(
            "<start_of_turn>user\n@<end_of_turn>\n", "<start_of_turn>model\n",
            "{% for c in m.tool_calls or [] %}call:{{ c.function.name }}{% endfor %}"
            "{% if not m.tool_calls %}<end_of_turn>\n{% endif %}",
            tool="<start_function_response>@<end_of_turn>\n",
        ),
        "<eos>",
    ),
}  # fmt: skip


def _mark_of(source: str, mark: str, *, turn: str, line: str = "") -> str:
    """The reference of a template of `_turns`: the marker of the next turn within what is generated."""
    ended = f"{{% generation %}}{line}{mark}{{% endgeneration %}}"
    is_behind = "not loop.first and messages[loop.index0 - 1].role == 'assistant'"
    assert source.count(turn) == 1
    return source.replace(turn, turn.replace(mark, f"{{% if {is_behind} %}}{ended}{{% else %}}{mark}{{% endif %}}"))


for _name, _mark, _turn in (
    ("baichuan 2", "<reserved_106>", "{% elif m.role == 'user' %}<reserved_106>"),
    ("a line in front of the marker", "<|user|>", "{% elif m.role == 'user' %}<|user|>"),
    ("the marker of a result ends a call", "<start_function_response>", "<start_function_response>{{"),
):
    FAMILIES[_name] = (_mark_of(FAMILIES[_name][0], _mark, turn=_turn), FAMILIES[_name][1])
