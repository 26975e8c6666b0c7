"""One model under one layout, held against the unmodified model of `transformers`: right, refused, wrong or a crash.

The reference is `AutoModelForCausalLM` with eager attention, every document alone, a plain loss, torch's own AdamW, in
fp64. Rows of unequal packed documents, random biases and norms: `tests/parity.py` has the documents and the options.
"""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from tests import parity
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.models.experts import router_buffers
from fivefold.models.sources import ModelTensors
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.optimizers import build_optimizer
from fivefold.verification.by_hand import exact
from tiny_configs import Values, default_config, make_config, tiny_values

TOLERANCE = 1e-9  # of the losses and every gradient; what is not the same differs by far more
ROWS = 8
EMPTY = parity.Case("single", rows=ROWS)


@dataclass(frozen=True)
class Tried:
    """A model, and how it is to be state. `steps` of AdamW are taken after the gradients are compared (0: none, which
    one process can do)."""

    model_class: str
    model_type: str
    values: Values
    layout: str = "single"
    steps: int = 2

    @property
    def parsed(self) -> Layout:
        """The layout in fp64, with all rows in one micro batch, or two where there is a pipeline."""
        plain, *more = self.layout.split("+")
        state = Layout.parse(plain)
        size = ROWS // (state.data_ranks * (2 if state.pp > 1 else 1))
        return Layout.parse("+".join([plain, f"mb{size}", "fp64", *more]))

    @property
    def documents(self) -> list[list[list[np.ndarray]]]:
        """The rows of each step."""
        return [parity.documents(EMPTY, step) for step in range(max(1, self.steps))]


@dataclass(frozen=True)
class Verdict:
    """`kind`: right, refused, WRONG, CRASH, or invalid where `transformers` itself cannot do it. `error`: the largest
    relative error of a gradient or loss, and of what; `reason`: in words, for everything but right."""

    kind: str
    error: float | None = None
    reason: str = ""


# On a rank ------------------------------------------------------------------------------------------------------------


def on_rank(tried: Tried) -> dict[str, Any]:
    """What this rank computes; the first one says what the reference computes, too. Nothing is raised."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        config = make_config(tried.model_type, tried.values)
    except Exception as error:
        return {"invalid": f"the config class refuses it: {_last_line(error)}"}
    found: dict[str, Any] = {}
    try:
        found = _subject(tried, config)
    except UserError as error:
        return {"refused": error.what}
    except Exception as error:
        found = {"crash": _last_line(error), "traceback": traceback.format_exc()[-2000:]}
    if found.get("rank", 0) == 0:
        try:
            found["reference"] = _reference(tried, config)
        except Exception as error:
            return {"invalid": f"transformers itself fails: {_last_line(error)}"}
    return found


def tiny_on_rank(model_type: str) -> tuple[Values | None, dict[str, Any]]:
    """A tiny config of a class that runs. Or none, and why: what fivefold says to the class's own config, if it
    refuses that, or else what `transformers` says to a tiny one."""
    logging.set_verbosity_error()
    values, why = tiny_values(model_type, _runs)
    if not why:
        return values, {}
    try:
        config = default_config(model_type)
    except Exception as error:
        return None, {"kind": "invalid", "reason": f"the config class fails: {_last_line(error)}"}
    try:
        model = build_meta(config)
        facts_of(model)
    except UserError as error:
        return None, {"kind": "refused", "reason": error.what}
    except Exception as error:
        in_transformers = Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts
        kind = "invalid" if "fivefold" not in in_transformers else "CRASH"
        return None, {"kind": kind, "reason": _last_line(error)}
    return None, {"kind": "invalid", "reason": f"no tiny config of it runs in transformers: {why}"}


def _runs(config: PreTrainedConfig) -> bool:
    with torch.no_grad():
        logits = random_model(config)(input_ids=torch.arange(12).unsqueeze(0), use_cache=False).logits
    return bool(logits.isfinite().all())


def random_model(config: PreTrainedConfig) -> Any:
    """The unmodified model in fp32, nothing in it zero or one."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    hf_internals.select_experts(hf_internals.base_first(model), "eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and parameter.ndim == 1 else 0.08 * noise)
        for name in router_buffers(model):
            if model.get_buffer(name).is_floating_point():
                model.get_buffer(name).normal_(std=0.08)
    return model


def _subject(tried: Tried, config: PreTrainedConfig) -> dict[str, Any]:
    layout = tried.parsed
    meta = build_meta(config)
    model = parallelize(meta, layout, source=ModelTensors(random_model(config)), loss_chunks=3)
    optimizer = build_optimizer(model, EMPTY.options)
    steps = [parity.batch_of(rows, layout, state_of(model).placement.data_rank) for rows in tried.documents]
    targets = sum(_targets(tried.documents[0]))
    with exact():
        loss = parity.gradients(model, steps[0], torch.tensor(1.0 / targets, dtype=torch.float64))
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        pieces = parity.pieces(model, gradients)
        optimizer.zero_grad(set_to_none=True)
        losses = [_step(model, optimizer, batch) for batch in steps[: tried.steps]] or [loss.item()]
    rank = torch.distributed.get_rank()
    return {"losses": losses, "gradients": pieces, "rank": rank}


def _step(model: Any, optimizer: Any, batch: Any) -> float:
    rate, norm = EMPTY.options.learning_rate, EMPTY.max_grad_norm
    return training_step.train_step(model, optimizer, batch, learning_rate=rate, max_grad_norm=norm).loss


def _reference(tried: Tried, config: PreTrainedConfig) -> dict[str, Any]:
    model = random_model(config).to(torch.float64)
    named = dict(model.named_parameters())
    optimizer = _adamw(model)
    losses, gradients = [], {}
    for rows in tried.documents:
        with exact():
            loss = _loss(model, [document for row in rows for document in row])
            loss.backward()
        if not losses:
            gradients = {n: (p.grad if p.grad is not None else torch.zeros_like(p)).numpy() for n, p in named.items()}
            gradients = {name: gradient.copy() for name, gradient in gradients.items()}
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), EMPTY.max_grad_norm)
        optimizer.step()
        model.zero_grad()
    return {"losses": losses, "gradients": gradients}


def _adamw(model: Any) -> torch.optim.Optimizer:
    """torch's own; vectors do not decay, of each expert neither."""
    options = EMPTY.options
    stacked = {id(p) for module in model.modules() if hf_internals.is_experts(module) for p in module.parameters()}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim - (id(parameter) in stacked) > 1].append(parameter)
    decays = {True: options.weight_decay, False: 0.0}
    return torch.optim.AdamW(
        [{"params": groups[each], "weight_decay": decay} for each, decay in decays.items()],
        lr=options.learning_rate, betas=options.betas, eps=options.eps,
    )  # fmt: skip


def _targets(rows: Sequence[Sequence[np.ndarray]]) -> list[int]:
    return [len(document) - 1 for row in rows for document in row]


def _loss(model: Any, documents: Sequence[np.ndarray]) -> Tensor:
    """The mean over all targets; documents of one length in one batch."""
    summed, lengths = torch.zeros((), dtype=torch.float64), sorted({len(d) for d in documents if len(d) > 1})
    for length in lengths:
        ids = torch.from_numpy(np.stack([document for document in documents if len(document) == length]))
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        summed = summed + torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return summed / sum(len(document) - 1 for document in documents)


# Judging --------------------------------------------------------------------------------------------------------------


def judged(ranks: Sequence[dict[str, Any]]) -> Verdict:
    """What the ranks' results amount to."""
    for kind, name in (("invalid", "invalid"), ("refused", "refused"), ("crash", "CRASH")):
        for each in ranks:
            if kind in each:
                return Verdict(name, reason=each[kind])
    expected = ranks[0]["reference"]
    shapes = {name: gradient.shape for name, gradient in expected["gradients"].items()}
    try:
        gradients = parity.gathered([each["gradients"] for each in ranks], shapes)
    except AssertionError as error:
        return Verdict("WRONG", reason=str(error))
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in expected["gradients"].values()))
    errors = {
        f"the gradient of {name}": np.linalg.norm(gradients[name] - right) / max(np.linalg.norm(right), 1e-6 * norm)
        for name, right in expected["gradients"].items()
    }
    for step, right in enumerate(expected["losses"]):
        errors[f"the loss of step {step + 1}"] = max(abs(each["losses"][step] - right) / abs(right) for each in ranks)
    if all(np.isnan(each) for each in expected["losses"]):
        return Verdict("invalid", reason="the loss of transformers is not a number")
    worst = max(errors, key=lambda name: (np.isnan(errors[name]), errors[name]))
    error = float(errors[worst])
    right = error <= TOLERANCE
    return Verdict("right" if right else "WRONG", error, "" if right else f"{worst} differs by {error:.1e}")


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
