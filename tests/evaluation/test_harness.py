"""Tasks of lm-eval from local files give what the model alone gives, computed here by hand."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.core.errors import UserError
from fivefold.evaluation.report import EvaluateReport
from fivefold.launch.once import run_once
from tests.checkpoint.folders import OVERRIDES, hf_folder
from tests.parity import Case

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.full

QUESTIONS = [
    ("The sky is", ["blue", "a fish", "4"], 0), ("2+2 =", ["five", "4", "no"], 1), ("Well", ["a", "or not"], 0),
    ("def", ["f", "class"], 1), ("Q: naïve?", ["yes", "no"], 1),
]  # fmt: skip
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


class Plain:
    """`transformers` alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.no_grad()
    def score(self, given: list[int], answer: list[int]) -> float:
        chances = self.model(torch.tensor([[*given, *answer]])).logits[0].double().log_softmax(-1)
        return sum(float(chances[len(given) - 1 + at, token]) for at, token in enumerate(answer))

    def write(self, text: str, tokens: int) -> str:
        ids = torch.tensor([self.ids(text)])
        out = self.model.generate(ids, do_sample=False, max_new_tokens=tokens, top_p=None, temperature=None)
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).partition("\n")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = (*OVERRIDES, ("max_position_embeddings", 128))
    return hf_folder(Case("single+fp32", overrides=overrides), tmp_path_factory.mktemp("lm-eval") / "hf")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Path:
    """A folder of tasks; of the second half of the questions the right text is what the model writes."""
    place, plain = folder.parent / "tasks", Plain(folder)
    place.mkdir()
    rows = [
        {
            "question": question, "choices": choices, "answer": answer,
            "written": plain.write(question, 5) if number > 1 else "something else",
        }
        for number, (question, choices, answer) in enumerate(QUESTIONS)
    ]  # fmt: skip
    (place / "questions.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}}
        whole = {"task": name, **data, "test_split": "test", **task, "metadata": {"version": 1.0}}
        (place / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")  # JSON is YAML
    return place


def evaluated(folder: Path, tasks: Path, **options: Any) -> EvaluateReport:
    request = {"model": str(folder), "tasks": [str(tasks)], "batch_size": 3, **options}
    layout = options.get("layout", "single")
    found = run_once("fivefold.evaluation.run", {"evaluate": request}, layout=layout, device="cpu", what="evaluate")
    return EvaluateReport.of(found)


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    """No task may ask the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.mark.parametrize("layout", ["single", "tp2"])
def test_a_folder_of_tasks(folder: Path, tasks: Path, layout: str) -> None:
    plain = Plain(folder)
    right, right_by_length = 0, 0
    for question, choices, answer in QUESTIONS:
        scores = [plain.score(plain.ids(question), plain.ids(f" {choice}")) for choice in choices]
        by_length = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        right += scores.index(max(scores)) == answer
        right_by_length += by_length.index(max(by_length)) == answer
    summed = sum(plain.score([256], plain.ids(question)) for question, *_ in QUESTIONS)
    words = sum(len(question.split()) for question, *_ in QUESTIONS)
    size = sum(len(question.encode()) for question, *_ in QUESTIONS)
    report = evaluated(folder, tasks, layout=layout)
    found = {(row.task, row.metric): row.value for row in report.tasks}
    assert found["choices", "acc"] == pytest.approx(right / len(QUESTIONS))
    assert found["choices", "acc_norm"] == pytest.approx(right_by_length / len(QUESTIONS))
    assert 0 < right < len(QUESTIONS)  # neither always nor never
    assert found["rolling", "word_perplexity"] == pytest.approx(math.exp(-summed / words), rel=1e-5)
    assert found["rolling", "bits_per_byte"] == pytest.approx(-summed / size / math.log(2), rel=1e-5)
    assert found["written", "exact_match"] == pytest.approx(3 / 5)
    assert {row.samples for row in report.tasks} == {5} and report.versions["choices"] == 1.0


def test_a_part_of_each_task_and_texts_beside(folder: Path, tasks: Path) -> None:
    report = evaluated(folder, tasks, limit=2, text=str(tasks / "questions.jsonl"), text_key="question")
    assert {row.samples for row in report.tasks} == {2}
    assert report.text is not None and report.text.targets == sum(len(q.encode()) for q, *_ in QUESTIONS)


def test_a_task_that_is_not_known_is_said(folder: Path, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lm-eval: "):
        evaluated(folder, Path("no_such_task_here"))
    with pytest.raises(UserError, match=r"no \.yaml in it names a task"):
        evaluated(folder, tmp_path)


def test_stop_strings_of_the_folder_end_what_a_model_writes(folder: Path, tasks: Path, tmp_path: Path) -> None:
    stops, plain = tmp_path / "stops", Plain(folder)
    right = [plain.write(question, 5) for question, *_ in QUESTIONS[2:]]
    stop = right[0].strip()[-1]
    shutil.copytree(folder, stops)
    (stops / "generation_config.json").write_text(json.dumps({"stop_strings": stop}), encoding="utf-8")
    found = {(row.task, row.metric): row.value for row in evaluated(stops, tasks).tasks}
    assert found["written", "exact_match"] == pytest.approx(sum(stop not in text for text in right) / len(QUESTIONS))
