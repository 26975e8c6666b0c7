"""What the ranks of the generation tests do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache

from fivefold.generation import GenerateRequest
from fivefold.generation import decode as decoding
from fivefold.generation.decode import KvCache, decode, decode_rows, next_logits, ready
from fivefold.generation.run import generate
from fivefold.generation.sampling import Sampling
from fivefold.generation.text import encode_prompt, pieces
from fivefold.launch.world import World
from fivefold.models.build import build_meta
from fivefold.models.sources import ModelTensors
from fivefold.parallel.apply import parallelize
from fivefold.parallel.collectives import by_group, total
from fivefold.parallel.mesh import record
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import declare, step_shape, train_step
from tests.parity import OPTIONS, Case, batch_of, documents, hf_config, reference_model

PROMPT = [5, 71, 3, 44, 9]


def talkative(case: Case) -> Any:
    """The unmodified model of the case with blocks loud enough that the text does not get stuck on one token."""
    model = reference_model(case, torch.float32).eval()
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1):
            parameter.mul_(6)
    return model


def build(case: Case) -> Any:
    return parallelize(build_meta(hf_config(case)), case.parsed, source=ModelTensors(talkative(case)))


def continue_greedily(case: Case, tokens: int) -> list[int]:
    model = build(case)
    with ready(model):
        return list(decode(model, torch.tensor([PROMPT]), max_new_tokens=tokens))


def draw(case: Case, seed: int) -> list[int]:
    model = build(case)
    options = {"max_new_tokens": 12, "temperature": 0.9, "top_k": 40, "seed": seed}
    with ready(model):
        return list(decode(model, torch.tensor([PROMPT]), **options))


def cache_error(case: Case, tokens: int) -> float:
    """Largest difference between logits from the cache and logits from the whole text at once."""
    model = build(case)
    ids, cache, error = list(PROMPT), DynamicCache(), 0.0
    with ready(model):
        logits_V = next_logits(model, torch.tensor([ids]), cache=cache)[0]
        for _ in range(tokens):
            whole_V = next_logits(model, torch.tensor([ids]))[0]
            error = max(error, (logits_V - whole_V).abs().max().item())
            ids.append(int(whole_V.argmax()))
            logits_V = next_logits(model, torch.tensor([ids[-1:]]), cache=cache, past=len(ids) - 1)[0]
    return error


def continue_batch(
    case: Case, prompts: list[list[int]], tokens: int, ends: tuple[int, ...] = (), sampling: Sampling | None = None
) -> tuple[list[list[int]], int]:
    """The tokens that continue each prompt, in one batch, and how many tokens went through the model."""
    model, found, counted = build(case), [list[int]() for _ in prompts], Counted()
    with ready(model), counted.through(model):
        for step in decode_rows(
            model, prompts, max_new_tokens=tokens, sampling=sampling or Sampling(), seeds=range(len(prompts)),
            is_over=lambda _, token: token in ends,
        ):  # fmt: skip
            for row, token in step:
                found[row].append(token)
    return found, counted.tokens


def converse(case: Case, turns: list[list[int]], tokens: int) -> tuple[list[list[int]], list[int]]:
    """What is answered to each of some texts, each after all that was said; and the tokens through the model."""
    model, said, answers, counts, seen = build(case), list[int](), [], [], KvCache()
    for turn in turns:
        said += turn
        counted = Counted()
        with ready(model), counted.through(model):
            answers.append(list(decode(model, torch.tensor([said]), max_new_tokens=tokens, seen=seen)))
        said += answers[-1]
        counts.append(counted.tokens)
    return answers, counts


class Counted:
    """Tokens that a model embeds."""

    tokens = 0

    @contextmanager
    def through(self, model: Any) -> Iterator[None]:
        hook = model.get_input_embeddings().register_forward_pre_hook(self._count)
        yield
        hook.remove()

    def _count(self, _: Any, args: tuple[Any, ...]) -> None:
        self.tokens += args[0].numel()


def stop_at(case: Case, end: int) -> list[int]:
    model = build(case)
    with ready(model):
        return list(decode(model, torch.tensor([PROMPT]), max_new_tokens=20, eos_token_ids={end}))


class Numbers:
    """A tokenizer whose text is the numbers of its tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return type("Encoding", (), {"ids": [int(word) for word in text.split()]})

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def train_with_samples(case: Case, samples: bool, gather_once: bool = True) -> tuple[list[float], str]:
    """Losses of three steps, with or without a sample before each, and the last sample."""
    model = build(case)
    optimizer = build_optimizer(model, OPTIONS)
    mesh = state_of(model).mesh
    model.train()
    before = decoding.GATHER_ONCE_BYTES
    decoding.GATHER_ONCE_BYTES = before if gather_once else 0
    losses, text = [], ""
    for step in range(3):
        if samples:
            ids = encode_prompt(Numbers(), "5 71 3", (), ())
            text = "".join(pieces(model, Numbers(), ids, (), max_new_tokens=7))
            assert model.training and torch.is_grad_enabled()
        batch = batch_of(documents(case, step), case.parsed, state_of(model).placement.data_rank)
        with record(mesh) as found:
            losses.append(train_step(model, optimizer, batch, learning_rate=3e-3, max_grad_norm=0.5).loss)
        shape = step_shape(model, *batch[0].input_ids.shape, len(batch), batch=batch)
        assert total(found) == by_group(declare(model, shape), mesh.grid)  # each unit gathers by its own rule again
    decoding.GATHER_ONCE_BYTES = before
    return losses, text


def from_folder(folder: Path, layout: str, tokens: int) -> tuple[str, str]:
    """(new text, what went to the screen on this rank)."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    request = GenerateRequest(
        model=str(folder), prompt="def naïve(", layout=layout, max_new_tokens=tokens, temperature=0.0
    )
    shown: list[str] = []
    return generate(request, world, write=shown.append), "".join(shown)
