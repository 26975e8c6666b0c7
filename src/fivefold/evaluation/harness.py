"""Tasks of EleutherAI's lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) over a model under any layout.

lm-eval runs on the first rank. Its requests to the model go to all ranks, which compute them together.

Legend: B texts, K tokens of the longest continuation, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fivefold.core.errors import UserError, first_line
from fivefold.data.tokenizer import put_bos
from fivefold.evaluation import EvaluateRequest
from fivefold.evaluation.report import TaskResult
from fivefold.generation import GenerateRequest
from fivefold.generation.decode import next_logits, padded, ready
from fivefold.generation.opened import OpenModel
from fivefold.generation.prompts import Prompt, answers
from fivefold.launch.world import World
from fivefold.parallel.plain import of_first

_POSITIONS = 2048  # for a model whose config has none
_NEW_TOKENS = 256  # default of a task, as in lm-eval
_END = "end"


def evaluate_tasks(
    opened: OpenModel, request: EvaluateRequest, world: World
) -> tuple[list[TaskResult], Mapping[str, Any]]:
    """Evaluate `request.tasks`: results and versions on the first rank, nothing on others. Raises `UserError` if
    lm-eval is not installed or rejects the tasks."""
    ranks = _Ranks(opened, request.batch_size)
    if not world.is_first:
        ranks.serve()
        return [], {}
    with ranks.served(), _words():
        return _evaluated(opened, request, ranks)


def _evaluated(
    opened: OpenModel, request: EvaluateRequest, ranks: "_Ranks"
) -> tuple[list[TaskResult], Mapping[str, Any]]:
    try:
        from lm_eval.evaluator import simple_evaluate
    except ImportError as error:
        raise UserError(f"--tasks needs lm-eval: {error}", fix="pip install fivefold[lm-eval]") from error
    found = simple_evaluate(
        model=_language_model(opened, ranks), tasks=_tasks(request.tasks), num_fewshot=request.num_fewshot,
        limit=request.limit, apply_chat_template=request.chat, bootstrap_iters=0 if request.limit else 1000,
        log_samples=False,
    )  # fmt: skip
    assert found is not None
    rows = [row for task, values in found["results"].items() for row in _results(task, values, found["n-samples"])]
    return rows, {name: found["versions"].get(name) for name in found["results"]}


@contextmanager
def _words() -> Iterator[None]:
    """Turn lm-eval's errors about tasks that it does not know or cannot load into `UserError`."""
    try:
        yield
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise UserError(
            f"lm-eval: {first_line(error)}", fix="lm-eval ls tasks names those that it has; a folder names your own"
        ) from error


def _results(task: str, values: Mapping[str, Any], samples: Mapping[str, Any]) -> list[TaskResult]:
    """Build results, such as one from `acc,none: 0.5` and `acc_stderr,none: 0.1`."""
    rows = []
    for key, value in values.items():
        metric, _, rule = key.partition(",")
        if rule and not metric.endswith("_stderr") and isinstance(value, int | float):
            error = values.get(f"{metric}_stderr,{rule}")
            rows.append(
                TaskResult(
                    task=task, metric=metric if rule == "none" else key, value=float(value),
                    error=float(error) if isinstance(error, int | float) else None,
                    samples=int((samples.get(task) or {}).get("effective", 0)),
                )
            )  # fmt: skip
    return rows


def _tasks(names: Sequence[str]) -> list[Any]:
    """Tasks for lm-eval: names, and the loaded tasks of folders. Paths in the files of a folder are relative to it."""
    from lm_eval.tasks import TaskManager

    found: list[Any] = []
    for name in names:
        folder = Path(name)
        if not folder.is_dir():
            found.append(name)
            continue
        own = sorted({task for file in folder.rglob("*.yaml") if (task := _task_of(file))})
        if not own:
            raise UserError(
                f"--tasks {name}: no .yaml in it names a task", fix="task: NAME", more="fivefold docs howto/evaluate"
            )
        with chdir(folder):
            manager = TaskManager(include_path=".", include_defaults=False)
            found += manager.load(own)["tasks"].values()
    return found


def _task_of(file: Path) -> str | None:
    """Name of the task in a file, if any."""

    class Loader(yaml.SafeLoader):
        """Loader that ignores the functions of a task: lm-eval loads them."""

    Loader.add_multi_constructor("!", lambda *_: None)
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not a task: {first_line(error)}", fix="see fivefold docs howto/evaluate") from error
    name = tree.get("task") if isinstance(tree, dict) else None
    return name if isinstance(name, str) else None


# ---- the ranks -------------------------------------------------------------------------------------------------------


@dataclass
class _Ranks:
    """Computations of all ranks together, requested by the first one."""

    opened: OpenModel
    batch_size: int
    is_computing: bool = False  # stays true after a failure: the others then do not listen for the end

    def call(self, kind: str, value: Any) -> Any:
        """On the first rank: have all ranks compute `kind` of `value`, which is JSON, and return the result."""
        of_first([kind, value])
        self.is_computing = True
        found = self._do(kind, value)
        self.is_computing = False
        return found

    def serve(self) -> None:
        """On the other ranks: compute each request, until the end."""
        while True:
            kind, value = of_first(None)
            if kind == _END:
                return
            self._do(kind, value)

    @contextmanager
    def served(self) -> Iterator[None]:
        """On the first rank: inside, the others serve."""
        try:
            yield
        finally:
            if not self.is_computing:
                of_first([_END, None])

    def _do(self, kind: str, value: Any) -> Any:
        do: Callable[[Any], Any] = {"score": self._score, "write": self._write}[kind]
        return do(value)

    def _score(self, pairs: Any) -> list[tuple[float, bool]]:
        return log_probabilities(self.opened.model, pairs, batch_size=self.batch_size)

    def _write(self, asked: Any) -> list[str]:
        request = GenerateRequest(model="", prompt="", **asked["options"])
        stop = (*request.stop, *self.opened.stop)
        prompts = [Prompt(ids, {}, self.opened.ends, stop) for ids in asked["prompts"]]
        found: list[str] = []
        for first in range(0, len(prompts), self.batch_size):
            part = prompts[first : first + self.batch_size]
            found += [answer.text for answer in answers(self.opened, part, request, first=first)]
        return found


# ---- the model of lm-eval --------------------------------------------------------------------------------------------


def _language_model(opened: OpenModel, ranks: _Ranks) -> Any:
    """Wrap the model as lm-eval's language model."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    config = opened.model.config.get_text_config()
    positions = int(getattr(config, "max_position_embeddings", None) or _POSITIONS)
    bos = opened.info.bos_token_ids

    class LanguageModel(TemplateLM):  # type: ignore[misc]
        """Texts begin with BOS if those of training do; a text alone is scored after BOS, else after EOS."""

        tokenizer_name = opened.info.digest
        by_template = False  # true if prompts are conversations: the template writes their BOS

        @property
        def eot_token_id(self) -> int:
            return opened.info.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return bos[-1] if bos else opened.info.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = opened.encode(string)
            return ids if add_special_tokens is False or self.by_template else put_bos(ids, bos)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return self._scores([(given, scored) for _, given, scored in requests])

        def _scores(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
            """Score pairs; those longer than the model's positions lose their front."""
            kept = []
            for given, scored in pairs:
                scored = list(scored)[-positions:]
                if not scored:
                    raise UserError("lm-eval: an answer without a token", fix="give every choice some text")
                kept.append((list(given)[-max(1, positions + 1 - len(scored)) :] or [self.prefix_token_id], scored))
            return [(float(summed), bool(greedy)) for summed, greedy in ranks.call("score", kept)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                windows = get_rolling_token_windows(
                    self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id, positions, 1
                )
                found.append(sum(summed for summed, _ in self._scores([*map(make_disjoint_window, windows)])))
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for at, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(at)
            found: dict[int, str] = {}
            for places in groups.values():
                given = normalize_gen_kwargs(requests[places[0]].args[1], _NEW_TOKENS)
                options = _options(given)
                room = max(1, positions - options["max_new_tokens"])
                prompts = [self._prompt(requests[at].args[0])[-room:] for at in places]
                found |= zip(places, ranks.call("write", {"prompts": prompts, "options": options}), strict=True)
            return [found[at] for at in range(len(requests))]

        def _prompt(self, text: str) -> list[int]:
            return self.tok_encode(text) or [self.prefix_token_id]

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return opened.info.template.text() if chat_template else None

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            self.by_template = True
            text = opened.info.template.render(chat_history, answer=add_generation_prompt)
            if add_generation_prompt:
                return text
            last = str(chat_history[-1]["content"])
            return text[: text.rindex(last) + len(last)]  # the model continues the last message

    return LanguageModel()


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `GenerateRequest` from lm-eval's generation arguments. Raises `UserError` for unsupported ones."""
    known = ("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks")
    if unknown := [key for key, value in given.items() if key not in known and value is not None]:
        raise UserError(f"lm-eval: generation_kwargs.{unknown[0]} is not served", fix=f"known are {', '.join(known)}")
    drawn = {"top_k": int(given.get("top_k") or 0), "top_p": float(given.get("top_p") or 1.0)}
    temperature = float(given.get("temperature") or 1.0) if given.get("do_sample") else 0.0
    stop = [text for text in given.get("until") or () if text]
    return {**drawn, "temperature": temperature, "stop": stop, "max_new_tokens": int(given["max_gen_toks"])}


# ---- log-probabilities of texts after others -------------------------------------------------------------------------


_MOST_LOGITS = 2**28  # per batch: 1 GiB of fp32
Pair = tuple[Sequence[int], Sequence[int]]  # given tokens, scored tokens; at least one each


def log_probabilities(model: Any, pairs: Sequence[Pair], *, batch_size: int) -> list[tuple[float, bool]]:
    """Score pairs: the summed log-probability, nats, of the second text after the first, and whether each of its tokens
    is the likeliest. Every rank calls this with the same pairs, and gets the same result."""
    found: dict[int, tuple[float, bool]] = {}
    longest_first = sorted(range(len(pairs)), key=lambda at: -len(pairs[at][0]) - len(pairs[at][1]))
    with ready(model):
        for places in _batches(pairs, longest_first, batch_size, model.config.get_text_config().vocab_size):
            found |= zip(places, _scored(model, [pairs[at] for at in places]), strict=True)
    return [found[at] for at in range(len(pairs))]


def _batches(pairs: Sequence[Pair], places: Sequence[int], size: int, vocabulary: int) -> list[list[int]]:
    """Group places into batches of at most `size`, whose logits fit in memory."""
    batches: list[list[int]] = []
    for at in places:
        scored = max(len(pairs[place][1]) for place in (*(batches[-1] if batches else ()), at))
        if batches and len(batches[-1]) < size and (len(batches[-1]) + 1) * scored * vocabulary <= _MOST_LOGITS:
            batches[-1].append(at)
        else:
            batches.append([at])
    return batches


def _scored(model: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    device = next(model.parameters()).device
    ids_BT, padding = padded([[*given, *scored][:-1] for given, scored in pairs])
    keep = max(len(scored) for _, scored in pairs)
    logits: Tensor = next_logits(model, ids_BT.to(device), padding=padding, keep=keep)
    logits_BKV = logits if keep > 1 else logits[:, None]
    each = zip(logits_BKV, (scored for _, scored in pairs), strict=True)
    return [_of_one(logits_KV[-len(scored) :], scored) for logits_KV, scored in each]


def _of_one(logits_KV: Tensor, scored: Sequence[int]) -> tuple[float, bool]:
    tokens_K = torch.tensor(list(scored), device=logits_KV.device)
    chances_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32)).log_softmax(-1)
    summed = chances_KV.gather(-1, tokens_K[:, None]).double().sum()
    return float(summed), bool((logits_KV.argmax(-1) == tokens_K).all())
