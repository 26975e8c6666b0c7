"""Records as people publish them, cut short, and the rows that they are: what is trained stands in double brackets.

Written by hand. The template writes `<role>content</s>`, tools in front, and calls behind the content. `keys`: keys of
the source in a run file. `left_out`: the columns that a run must name.
"""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Form:
    """One or several records of a set, and their rows."""

    name: str
    records: list[dict[str, Any]]
    rows: list[str]
    left_out: tuple[str, ...] = ()
    by_template: tuple[str, ...] = ()  # left out of turns
    keys: dict[str, Any] = field(default_factory=dict)
    objective: str = "sft"


def form(name: str, record: Any, rows: str | list[str], left_out: str = "", **more: Any) -> Form:
    """`record`: one, or a list of them; `left_out`: names with spaces between."""
    records = record if isinstance(record, list) else [record]
    names = tuple(left_out.split()), tuple(more.pop("by_template", "").split())
    return Form(name, records, [rows] if isinstance(rows, str) else rows, *names, **more)


def turns(*said: str, role: str = "role", content: str = "content", names: str = "system user assistant") -> Any:
    """A conversation of a user and an assistant by turns; of an odd number, the first is the system's."""
    system, user, assistant = names.split()
    roles = [system] * (len(said) % 2) + [user, assistant] * (len(said) // 2)
    return [{role: each, content: text} for each, text in zip(roles, said, strict=True)]


def sharegpt(*said: str) -> Any:
    return turns(*said, role="from", content="value", names="system human gpt")


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def of_user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def of_assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


QA = "<user>Q</s><assistant>[[A</s>]]"
TOOL = {"name": "get", "description": "d", "parameters": {"type": "object", "properties": {}}}
WRITTEN_TOOL = (
    '<tools>[{"type": "function", "function": {"name": "get", "description": "d", "parameters": '
    '{"type": "object", "properties": {}}}}]</tools>'
)
CALLED = (
    '<user>W?</s><assistant>[[<call>{"name": "get", "arguments": {"a": 1}}</call></s>]]<tool>1</s><assistant>[[ok</s>]]'
)

CHAT = [
    form("OpenAI: messages", {"messages": turns("Q", "A")}, QA),
    form(
        "OpenAI: a weight of 0 leaves a turn untrained, and functions are tools",
        {
            "messages": [of_user("P"), {**of_assistant("B"), "weight": 0}, *turns("Q", "A")],
            "functions": [TOOL],
            "parallel_tool_calls": False,
        },
        f"{WRITTEN_TOOL}<user>P</s><assistant>B</s>{QA}",
        "parallel_tool_calls",
    ),
    form(
        "ms-swift, axolotl: other names of a weight of 0",
        {"messages": [of_user("P"), {**of_assistant("B"), "loss": False}, of_user("P"),
                      {**of_assistant("B"), "train": False}, of_user("Q"), {**of_assistant("A"), "loss": True}]},
        f"<user>P</s><assistant>B</s><user>P</s><assistant>B</s>{QA}",
    ),
    form(
        "Tulu 3",
        {"id": "t_1", "messages": turns("Q", "A", "R", "B"), "source": "ai2-adapt-dev/x"},
        f"{QA}<user>R</s><assistant>[[B</s>]]",
        "id source",
    ),
    form(
        "no_robots",
        {"prompt": "Q", "prompt_id": "a9", "messages": turns("S", "Q", "A"), "category": "Chat"},
        f"<system>S</s>{QA}",
        "prompt prompt_id category",
    ),
    form(
        "UltraChat 200k",
        {"prompt": "Q", "prompt_id": "f0", "messages": turns("Q", "A")},
        QA,
        "prompt prompt_id",
    ),
    form("UltraChat, as it was: texts by turns", {"id": "0", "data": ["Q", "A"]}, QA, "id"),
    form("LIMA: texts by turns", {"conversations": ["Q", "A", "R", "B"], "source": "x"},
         f"{QA}<user>R</s><assistant>[[B</s>]]", "source"),
    form("ShareGPT", {"id": "QWJhYvA_0", "conversations": sharegpt("Q", "A")}, QA, "id"),
    form(
        "ShareGPT, of other models",
        {"conversations": [{"from": "user", "value": "Q"}, {"from": "bing", "value": "A"}]},
        QA,
    ),
    form(
        "OpenHermes 2.5",
        {
            "custom_instruction": None, "topic": None, "model": "gpt-4", "category": "orca", "system_prompt": None,
            "conversations": [
                {"from": "human", "value": "Q", "weight": None}, {"from": "gpt", "value": "A", "weight": None},
            ],
            "id": None, "source": "airoboros", "views": None,
        },
        QA,
        "custom_instruction topic model category id source views",
    ),
    form(
        "SlimOrca",
        {
            "conversations": [
                {"from": "system", "value": "S", "weight": None}, {"from": "human", "value": "Q", "weight": 0.0},
                {"from": "gpt", "value": "A", "weight": 1.0},
            ]
        },
        f"<system>S</s>{QA}",
    ),
    form(
        "Capybara: exchanges",
        {"source": "Airoboros", "conversation": [{"input": "Q", "output": "A"}, {"input": "R", "output": "B"}]},
        f"{QA}<user>R</s><assistant>[[B</s>]]",
        "source",
    ),
    form("BELLE, MOSS: exchanges", {"conversation": [{"human": "Q", "assistant": "A"}], "kind": "c"}, QA, "kind"),
    form(
        "XTuner: exchanges, with a system text in the first",
        {"conversation": [{"system": "S", "input": "Q", "output": "A"}, {"input": "R", "output": "B"}]},
        f"<system>S</s>{QA}<user>R</s><assistant>[[B</s>]]",
    ),
    form(
        "Magpie: the conversation, of which the others are the first turns",
        {
            "uuid": "u", "model": "m", "gen_input_configs": {"temperature": 1.0}, "instruction": "Q", "response": "A",
            "conversations": sharegpt("Q", "A"), "task_category": "Math", "instruct_reward": -1.5,
        },
        QA,
        "uuid model gen_input_configs instruction response task_category instruct_reward",
    ),
    form(
        "WildChat: turns with much beside",
        {
            "conversation_hash": "h", "model": "gpt-4", "turn": 1, "language": "English",
            "conversation": [{**each, "country": "X", "toxic": False} for each in turns("Q", "A")],
        },
        QA,
        "conversation_hash model turn language",
        by_template="country toxic",
    ),
    form(
        "LMSYS-Chat-1M",
        {"conversation_id": "c", "conversation": turns("Q", "A"), "turn": 1},
        QA,
        "conversation_id turn",
    ),
    form(
        "OpenThoughts: the system text in a column",
        {"system": "S", "conversations": turns("Q", "A", role="from", content="value")},
        f"<system>S</s>{QA}",
    ),
    form(
        "SmolTalk 2: what the template is to do",
        {"messages": turns("Q", "A"), "chat_template_kwargs": {"enable_thinking": True}, "source": "x"},
        f"<think/>{QA}",
        "source",
    ),
    form("a conversation as JSON in a string", {"messages": '[{"role": "user", "content": "Q"}, '
         '{"role": "assistant", "content": "A"}]'}, QA),
    form(
        "a conversation as datasets gives a sequence: a list for each key",
        {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
        QA,
    ),
    form("pairs of texts", {"conversation": [["Q", "A"], ["R", "B"]]}, f"{QA}<user>R</s><assistant>[[B</s>]]"),
    form(
        "NuminaMath-CoT",
        {"source": "synthetic", "problem": "Q", "solution": "A", "messages": turns("Q", "A")},
        QA,
        "source problem solution",
    ),
]  # fmt: skip

TOOLS = [
    form(
        "LLaMA-Factory: function_call, observation, tools in a string",
        {
            "conversations": [
                {"from": "human", "value": "W?"},
                {"from": "function_call", "value": '{"name": "get", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "1"}, {"from": "gpt", "value": "ok"},
            ],
            "tools": '[{"name": "get", "description": "d", "parameters": {"type": "object", "properties": {}}}]',
        },
        WRITTEN_TOOL + CALLED,
    ),
    form(
        "APIGen-MT: the same with a system text and two calls at once",
        {
            "system": "S",
            "conversations": [
                {"from": "human", "value": "W?"},
                {"from": "function_call", "value": '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'},
                {"from": "observation", "value": "1"},
            ],
            "tools": "[]",
        },
        '<system>S</s><user>W?</s><assistant>[[<call>{"name": "a", "arguments": {}}</call>'
        '<call>{"name": "b", "arguments": {}}</call></s>]]<tool>1</s>',
    ),
    form(
        "OpenAI: arguments in a string, and a content that is null",
        {
            "messages": [
                of_user("W?"),
                {"role": "assistant", "content": None, "tool_calls": [call("get", '{"a": 1}', id="call_1")]},
                {"role": "tool", "tool_call_id": "call_1", "content": "1"}, of_assistant("ok"),
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        WRITTEN_TOOL + CALLED,
    ),
    form(
        "OpenAI, as it was: function_call in a turn",
        {
            "messages": [
                of_user("W?"),
                {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": '{"a": 1}'}},
                {"role": "function", "name": "get", "content": "1"}, of_assistant("ok"),
            ],
            "functions": [TOOL],
        },
        WRITTEN_TOOL + CALLED,
        by_template="name",
    ),
    form(
        "transformers: call with empty content, tool result, answer",
        {
            "messages": [
                of_user("W?"), {"role": "assistant", "content": "", "tool_calls": [call("get", {"a": 1})]},
                {"role": "tool", "content": "1"}, of_assistant("ok"),
            ]
        },
        CALLED,
    ),
    form(
        "xlam: the answers are calls, in a string",
        {
            "id": 0, "query": "W?", "answers": '[{"name": "get", "arguments": {"a": 1}}]',
            "tools": '[{"name": "get", "description": "d", "parameters": {"type": "object", "properties": {}}}]',
        },
        WRITTEN_TOOL + '<user>W?</s><assistant>[[<call>{"name": "get", "arguments": {"a": 1}}</call></s>]]',
        "id",
    ),
    form(
        "Hermes: calls that are text already stay as they are",
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "S"}, {"from": "human", "value": "W?"},
                {"from": "gpt", "value": "<tool_call>\n{}\n</tool_call>"}, {"from": "tool", "value": "1"},
                {"from": "gpt", "value": "ok"},
            ],
            "tools": '[{"type": "function", "function": {"name": "get"}}]', "category": "c",
        },
        '<tools>[{"type": "function", "function": {"name": "get"}}]</tools><system>S</s><user>W?</s>'
        "<assistant>[[<tool_call>\n{}\n</tool_call></s>]]<tool>1</s><assistant>[[ok</s>]]",
        "id category",
    ),
]  # fmt: skip

INSTRUCTIONS = [
    form(
        "a system text beside the turn that says another one",
        {"system": "T", "messages": [{"role": "system", "content": "S"}, *turns("Q", "A")]},
        f"<system>S</s>{QA}", "system",
    ),
    form(
        "the same question in two columns",
        {"question": "Q", "instruction": "Q", "output": "A"}, QA,
    ),
    form("Alpaca", {"instruction": "Do:", "input": "it", "output": "A"}, "<user>Do:\nit</s><assistant>[[A</s>]]"),
    form("Alpaca without input", {"instruction": "Q", "input": "", "output": "A"}, QA),
    form(
        "Alpaca with a rendered text",
        {"instruction": "Q", "input": "", "output": "A", "text": "Below: Q. A"},
        "B[[elow: Q. A</s>]]",
        "instruction input output",
    ),
    form(
        "Alpaca with a rendered text, by name",
        {"instruction": "Q", "input": "", "output": "A", "text": "Below: Q. A"},
        QA,
        "text",
        keys={"format": "alpaca"},
    ),
    form(
        "Alpaca with a rendered text, as chat",
        {"instruction": "Q", "input": "", "output": "A", "text": "Below: Q. A"},
        QA,
        "text",
        keys={"format": "chat"},
    ),
    form(
        "LLaMA-Factory's Alpaca: system and history",
        {"instruction": "Do:", "input": "it", "output": "A", "system": "S", "history": [["q", "a"]]},
        "<system>S</s><user>q</s><assistant>[[a</s>]]<user>Do:\nit</s><assistant>[[A</s>]]",
    ),
    form(
        "Dolly",
        {"instruction": "Q", "context": "C", "response": "A", "category": "closed_qa"},
        "<user>Q\nC</s><assistant>[[A</s>]]",
        "category",
    ),
    form(
        "OpenOrca",
        {"id": "niv.1", "system_prompt": "S", "question": "Q", "response": "A"},
        f"<system>S</s>{QA}",
        "id",
    ),
    form(
        "Orca mini",
        {"system": "S", "instruction": "Do:", "input": "it", "output": "A"},
        "<system>S</s><user>Do:\nit</s><assistant>[[A</s>]]",
    ),
    form(
        "MetaMathQA",
        {"type": "MATH_AnsAug", "query": "Q", "original_question": "q", "response": "A"},
        QA,
        "type original_question",
    ),
    form("GSM8K", {"question": "Q", "answer": "A"}, QA),
    form(
        "NuminaMath 1.5: the solution, of which the answer is the last line",
        {"problem": "Q", "solution": "A", "answer": "4", "problem_type": "Algebra"},
        QA,
        "answer problem_type",
    ),
    form(
        "OpenMathInstruct 2",
        {"problem": "Q", "generated_solution": "A", "expected_answer": "4", "problem_source": "x"},
        QA,
        "expected_answer problem_source",
    ),
    form("MathInstruct", {"source": "data/CoT/x.json", "output": "A", "instruction": "Q"}, QA, "source"),
    form("Code Alpaca", {"prompt": "Q", "completion": "A"}, "Q[[A</s>]]"),
    form(
        "Python code instructions: a prompt that was put together of the others and the answer",
        {"instruction": "Do:", "input": "it", "output": "A", "prompt": "Below: Do: Input: it Output: A"},
        "<user>Do:\nit</s><assistant>[[A</s>]]",
    ),
    form(
        "a prompt that was put together of the others",
        {"prompt": "Below: Do: it", "instruction": "Do:", "input": "it", "response": "A"},
        "<user>Below: Do: it</s><assistant>[[A</s>]]",
    ),
    form(
        "a prompt that is empty",
        {"prompt": None, "instruction": "Do it", "input": "it", "output": "A"},
        "<user>Do it\nit</s><assistant>[[A</s>]]",
    ),
    form(
        "Magicoder",
        {"lang": "python", "raw_index": 1, "seed": "x", "problem": "Q", "solution": "A"},
        QA,
        "lang raw_index seed",
    ),
    form("CodeFeedback", {"query": "Q", "answer": "A", "resource": "x", "lang": "c"}, QA, "resource lang"),
    form("FLAN", {"inputs": "Q", "targets": "A", "task": "x"}, QA, "task"),
    form(
        "Natural instructions",
        {"task_name": "task1", "id": "1", "definition": "Do:", "inputs": "it", "targets": "A"},
        "<user>Do:\nit</s><assistant>[[A</s>]]",
        "task_name id",
    ),
    form("Aya", {"inputs": "Q", "targets": "A", "language": "Frisian", "user_id": "u"}, QA, "language user_id"),
    form("Firefly", {"kind": "NLI", "input": "Q", "target": "A"}, QA, "kind"),
    form("SQL with its schema", {"question": "Q", "context": "C", "answer": "A"},
         "<user>Q\nC</s><assistant>[[A</s>]]"),
    form("capital letters", {"Question": "Q", "Answer": "A"}, QA),
    form(
        "Nemotron: what is asked as turns",
        {"input": [of_user("P"), of_assistant("B"), of_user("Q")], "output": "A",
         "category": "math", "system_prompt": "S"},
        f"<system>S</s><user>P</s><assistant>B</s>{QA}",
        "category",
    ),
    form(
        "keys of other names",
        {"Frage": "Q", "Antwort": "A", "Quelle": "x"},
        "Q[[A</s>]]",
        "Quelle",
        keys={"columns": {"prompt": "Frage", "completion": "Antwort"}},
    ),
    form(
        "keys of other names, an input and a history, as turns",
        {"Frage": "Q", "Kontext": "C", "Antwort": "A", "Davor": [["q", "a"]]},
        "<user>q</s><assistant>[[a</s>]]<user>Q\nC</s><assistant>[[A</s>]]",
        keys={
            "format": "chat",
            "columns": {"prompt": "Frage", "input": "Kontext", "completion": "Antwort", "history": "Davor"},
        },
    ),
    form("a prompt and its completion", {"prompt": "Q?", "completion": " A", "id": 1}, "Q?[[ A</s>]]", "id"),
    form(
        "a prompt and its completion with a system text",
        {"prompt": "Q?", "completion": "A", "system": "S"},
        "S\n\nQ?[[A</s>]]",
    ),
    form(
        "the same, with the column named",
        {"prompt": "Q?", "completion": "A", "told": "S"},
        "S\n\nQ?[[A</s>]]",
        keys={"columns": {"system": "told"}},
    ),
    form(
        "the same, as turns",
        {"prompt": "Q", "completion": "A", "system": "S"},
        f"<system>S</s>{QA}",
        keys={"format": "chat"},
    ),
    form(
        "a prompt and its completion with tools, for which a text has no place",
        {"prompt": "Q", "completion": "A", "tools": [TOOL]},
        WRITTEN_TOOL + QA,
    ),
    form("a prompt of turns, whose answers are context", {"prompt": [*turns("P", "B"), of_user("Q")],
         "completion": [of_assistant("A")]}, f"<user>P</s><assistant>B</s>{QA}"),
    form("one message as the completion", {"prompt": [of_user("Q")], "completion": of_assistant("A")}, QA),
]  # fmt: skip

TEXTS = [
    form("C4", {"text": "body", "timestamp": "2019", "url": "x"}, "b[[ody</s>]]", "timestamp url"),
    form("OASST guanaco", {"text": "### Human: Q### Assistant: A"}, "#[[## Human: Q### Assistant: A</s>]]"),
    form(
        "OASST: a message of a tree each, read as texts",
        {"message_id": "m", "parent_id": None, "text": "body", "role": "prompter", "lang": "en"},
        "b[[ody</s>]]",
        "message_id parent_id role lang",
    ),
    form("The Stack", {"content": "body", "lang": "c"}, "b[[ody</s>]]", "lang", keys={"text_key": "content"}),
]

PAIR = ["<user>Q</s><assistant>[[A</s>]]", "<user>Q</s><assistant>[[B</s>]]"]
TOLD_PAIR = [f"<system>S</s>{each}" for each in PAIR]
GOOD, BAD = turns("Q", "A"), turns("Q", "B")

PREFERENCES = [
    form(
        "PKU-SafeRLHF: which of two is better, by its number",
        {
            "prompt": "Q", "response_0": "B", "response_1": "A", "better_response_id": 1, "safer_response_id": 0,
            "is_response_0_safe": True,
        },
        ["Q[[A</s>]]", "Q[[B</s>]]"], "safer_response_id is_response_0_safe",
    ),
    form(
        "HelpSteer3: a context, two answers, and by how much which is better",
        {"domain": "code", "context": [of_user("Q")], "response1": "A", "response2": "B", "overall_preference": -2},
        PAIR, "domain",
    ),
    form(
        "Chatbot Arena: two whole conversations, and which of them won",
        {
            "model_a": "x", "model_b": "y", "winner": "model_b", "conversation_a": turns("Q", "B"),
            "conversation_b": turns("Q", "A"),
        },
        PAIR, "model_a model_b",
    ),
    form(
        "OpenAI's preferences: a request, and two answers to it",
        {
            "input": {"messages": [of_user("Q")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [of_assistant("A")], "non_preferred_output": [of_assistant("B")],
        },
        PAIR,
    ),
    form(
        "hh-rlhf: texts with one beginning",
        {"chosen": "\n\nHuman: Q\n\nAssistant: yes", "rejected": "\n\nHuman: Q\n\nAssistant: no"},
        ["\n\nHuman: Q\n\nAssistant:[[ yes</s>]]", "\n\nHuman: Q\n\nAssistant:[[ no</s>]]"],
    ),
    form("hh-rlhf as turns", {"prompt": [of_user("Q")], "chosen": [of_assistant("A")], "rejected": [of_assistant("B")]},
         PAIR),
    form(
        "UltraFeedback binarized: messages beside it",
        {
            "prompt": "Q", "prompt_id": "p", "messages": GOOD, "chosen": GOOD, "rejected": BAD, "score_chosen": 8.5,
            "score_rejected": 4.0,
        },
        PAIR,
        "prompt_id messages score_chosen score_rejected",
    ),
    form("UltraFeedback of TRL", {"chosen": GOOD, "rejected": BAD, "score_chosen": 8.0}, PAIR, "score_chosen"),
    form(
        "Intel's Orca pairs",
        {"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
        TOLD_PAIR,
    ),
    form(
        "Argilla's Orca pairs",
        {"system": "S", "input": "Q", "chosen": "A", "rejected": "B", "generations": ["A", "B"], "rating": [9, 1]},
        TOLD_PAIR,
        "generations rating",
    ),
    form(
        "ORPO-DPO mix",
        {"source": "x", "chosen": GOOD, "rejected": BAD, "prompt": "Q", "question": "Q"},
        PAIR,
        "source question",
    ),
    form(
        "LLaMA-Factory's ranking: one message an answer",
        {"conversations": sharegpt("Q", "x")[:1], "chosen": {"from": "gpt", "value": "A"},
         "rejected": {"from": "gpt", "value": "B"}},
        PAIR,
    ),
    form(
        "axolotl: messages, and one message an answer",
        {"messages": [{"role": "system", "content": "S"}, of_user("Q")], "chosen": of_assistant("A"),
         "rejected": of_assistant("B")},
        TOLD_PAIR,
    ),
    form(
        "messages that end with the chosen answer",
        {"messages": GOOD, "chosen": [of_assistant("A")], "rejected": [of_assistant("B")]},
        PAIR,
    ),
    form(
        "the system text in the prompt, and the question in the answers again",
        {"prompt": [{"role": "system", "content": "S"}, of_user("Q")], "chosen": GOOD, "rejected": BAD},
        TOLD_PAIR,
    ),
    form(
        "Alpaca",
        {"instruction": "Do:", "input": "it", "chosen": "A", "rejected": "B"},
        [f"<user>Do:\nit</s><assistant>[[{each}</s>]]" for each in "AB"],
    ),
    form(
        "StackExchange paired",
        {"qid": 1, "question": "Q", "date": "d", "response_j": "A", "response_k": "B"},
        PAIR,
        "qid date",
    ),
    form(
        "Argilla's math preferences",
        {"metadata": "{}", "instruction": "Q", "chosen_response": "A", "rejected_response": "B", "chosen_rating": 5.0},
        PAIR,
        "metadata chosen_rating",
    ),
    form(
        "UltraInteract",
        {"task": "Math", "id": "1", "trajectory": [{"from": "user", "value": "Q"}], "chosen": "A", "rejected": "B"},
        PAIR,
        "task id",
    ),
    form(
        "Truthy: texts with a system text",
        {"id": "x", "system": "S", "prompt": "Q ", "chosen": "A", "rejected": "B"},
        ["S\n\nQ [[A</s>]]", "S\n\nQ [[B</s>]]"],
        "id",
    ),
    form(
        "Capybara pairs: exchanges and texts beside whole conversations",
        {"conversation": [{"input": "Q", "output": "o"}], "original_response": "o", "prompt": "Q", "chosen": GOOD,
         "rejected": BAD},
        PAIR,
        "conversation original_response",
    ),
    form(
        "a text beside a pair",
        {"text": "x", "prompt": "Q", "chosen": "A", "rejected": "B"},
        ["Q[[A</s>]]", "Q[[B</s>]]"],
        "text",
    ),
    form("texts as turns", {"prompt": "Q", "chosen": "A", "rejected": "B"}, PAIR, keys={"format": "chat"}),
    form(
        "a pair with tools",
        {"prompt": "Q", "chosen": "A", "rejected": "B", "tools": [TOOL]},
        [WRITTEN_TOOL + each for each in PAIR],
    ),
]  # fmt: skip
PREFERENCES = [replace(each, objective="dpo") for each in PREFERENCES]

RATED = [
    form(
        "KTO of TRL",
        [
            {"prompt": [of_user("Q")], "completion": [of_assistant("A")], "label": True},
            {"prompt": [of_user("R")], "completion": [of_assistant("B")], "label": False},
        ],
        [QA, "<user>Q</s><assistant>[[B</s>]]", "<user>R</s><assistant>[[B</s>]]", "<user>R</s><assistant>[[A</s>]]"],
        objective="kto",
    ),
    form(
        "KTO of LLaMA-Factory",
        [{"messages": turns("Q", "A"), "label": True}, {"messages": turns("R", "B"), "label": False}],
        [QA, "<user>Q</s><assistant>[[B</s>]]", "<user>R</s><assistant>[[B</s>]]", "<user>R</s><assistant>[[A</s>]]"],
        objective="kto",
    ),
]

ALL = [*CHAT, *TOOLS, *INSTRUCTIONS, *TEXTS, *PREFERENCES, *RATED]

# What cannot be read as it is meant -> what is said of it.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("several answers", {"instruction": "Q", "output": "A", "response": "B"}, "sft",
     "these are instruction records ('instruction', 'output', 'response'), and which keys are asked and answered"),
    ("NQ: answers to choose from", {"question": "Q", "answer": ["A", "B"]}, "sft",
     "the answer: 2 texts in a list, and which is meant is not to be told"),
    ("columns in place of records", {"instruction": ["Q", "R"], "output": ["A", "B"]}, "sft", "2 texts in a list"),
    ("questions to choose from", {"prompt": ["Q", "R"], "completion": "A"}, "sft", "2 texts in a list"),
    ("a history without its answer", {"history": ["q"], "instruction": "Q", "output": "A"}, "sft",
     "the history ends with a question"),
    ("SQuAD", {"question": "Q", "answers": {"text": ["A"], "answer_start": [0]}}, "sft",
     "the answer, turn 1: no turn; its keys are 'text', 'answer_start'"),
    ("a prompt beside conversations with another question",
     {"prompt": "<user>Q", "chosen": turns("Q", "A"), "rejected": turns("Q", "B")}, "dpo",
     "the question of both answers, 'Q', is not that of the prompt"),
    ("half a turn", {"messages": [of_user("Q"), {**of_assistant("A"), "loss": 0.5}]}, "sft", "its loss is 0.5"),
    ("a call that is none", {"conversations": [{"from": "function_call", "value": "x"}]}, "sft",
     "turn 1: it calls no tool by name: 'x'"),
    ("an image in a column", {"messages": turns("Q", "A"), "images": ["cat.png"]}, "sft",
     "'images' is given, and the model reads text alone"),
    ("an image among the parts", {"messages": [{"role": "user", "content": [{"type": "image"}]}, of_assistant("A")]},
     "sft", "turn 1: a part of its content is 'image', not text"),
    ("options of a template that are no object", {"messages": turns("Q", "A"), "chat_template_kwargs": "x"}, "sft",
     "chat_template_kwargs are an object, not a str"),
]  # fmt: skip
