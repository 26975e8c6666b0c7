"""What becomes of a model and an optimizer that were saved, exported or asked for text; on one rank of a world."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import fivefold as ff
from fivefold.parallel.dtensor import local
from fivefold.verification.by_hand import exact
from tests.api.edges import freeze
from tests.api.loop import CLIP, OPTIMIZERS, as_numpy, build, plain, share
from tests.parity import Case, reference_model

Arrays = dict[str, np.ndarray]


def run(model: Any, optimizer: Any, steps: range) -> None:
    for at in steps:
        with exact():
            ff.train_step(model, optimizer, share(at, model.data_rank, model.data_ranks), max_grad_norm=CLIP)


def save(layout: str, kind: str, path: Path) -> tuple[Arrays, Arrays]:
    """Two steps, saved; the weights then, and after a third step."""
    model = ff.parallelize(build("llama"), layout)
    optimizer = OPTIMIZERS[kind](model)
    run(model, optimizer, range(2))
    ff.save(model, optimizer, path, state={"step": 2, "note": "ü"})
    saved = as_numpy(ff.gather(model))
    run(model, optimizer, range(2, 3))
    return saved, as_numpy(ff.gather(model))


def load(layout: str, kind: str, path: Path) -> tuple[Arrays, Arrays, list[dict[str, Any]]]:
    """Into a model of other values and an optimizer of other rates."""
    model = ff.parallelize(reference_model(Case("single")).apply(other_values), layout)
    optimizer = OPTIMIZERS[kind](model)
    for group in optimizer.param_groups:
        group |= {"lr": 7.0, "weight_decay": 7.0} | ({"betas": (0.7, 0.7)} if "betas" in group else {})
    with torch.no_grad():
        ff.logits(model, plain(np.random.default_rng(0), 1, 5))  # what is gathered must not outlive the loading
    assert ff.load(model, optimizer, path) == {"step": 2, "note": "ü"}
    found = as_numpy(ff.gather(model))
    run(model, optimizer, range(2, 3))
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return found, as_numpy(ff.gather(model)), options


def other_values(module: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.add_(1.0)


class Odd(torch.optim.Optimizer):
    """Descends, and keeps what optimizers of someone else's making may keep: numbers, and tensors of odd types."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "share": 0.0, "begun": True, "root": np.sqrt(2.0)}
                    state |= {"seen": torch.zeros((), dtype=torch.int64)}
                    state |= {"moment": torch.zeros_like(p, dtype=torch.bfloat16), "pair": p.new_zeros(2)}
                state["count"] += 1
                state["share"] = 1 / (2 + state["count"])
                state["seen"] += 3
                state["moment"].copy_(p.grad)
                state["pair"].mul_(0.5).add_(1.0)
                p.add_(p.grad, alpha=-group["lr"])


def odd_state(layout: str, frozen: str, path: Path) -> bool:
    """Everything that an optimizer keeps, saved and loaded: of the same type, of the same value."""
    model: Any = build("llama")
    if frozen:
        freeze(model, frozen)
    model = ff.parallelize(model, layout)
    optimizer, other = Odd(model.parameters()), Odd(model.parameters())
    run(model, optimizer, range(2))
    ff.save(model, optimizer, path)
    ff.load(model, other, path)
    for parameter in model.parameters():
        before, after = optimizer.state[parameter], other.state[parameter]
        assert before.keys() == after.keys()
        for key, value in before.items():
            loaded = local(after[key]) if isinstance(value, torch.Tensor) else after[key]
            kind = next(kind for kind in (torch.Tensor, bool, int, float) if isinstance(value, kind))
            assert type(loaded) is kind, key  # numpy's float64 becomes a float
            if isinstance(value, torch.Tensor):
                assert loaded.dtype == value.dtype and torch.equal(loaded, local(value)), key
            else:
                assert loaded == value, key
        assert not before or before["count"] == 2
    return True


def wrong_states(path: Path) -> bool:
    """Saving and loading what does not fit."""
    model = ff.parallelize(build("llama"), "tp2")
    adamw, sgd = OPTIMIZERS["adamw"](model), OPTIMIZERS["sgd"](model)
    one = torch.optim.AdamW(model.parameters())
    turned = torch.optim.AdamW(list(reversed(one.param_groups[0]["params"])))
    swapped = torch.optim.AdamW([{"params": g["params"]} for g in reversed(adamw.param_groups)])
    ff.save(model, adamw, path / "a")
    (path / "mine.txt").write_text("of the user")
    for call, told in (
        (lambda: ff.save(model, adamw, path / "a"), r"published already\n.*overwrite=True"),
        (lambda: ff.save(model, adamw, path / "b", state={"x": object()}), "not JSON"),
        (lambda: ff.save(model, adamw, path / "b", state={"x": float("nan")}), "not JSON"),
        (lambda: ff.load(model, sgd, path / "a"), "saved with AdamW"),
        (lambda: ff.load(model, one, path / "a"), "3 parameter groups"),
        (lambda: ff.load(model, swapped, path / "a"), "parameter group 0"),
        (lambda: ff.load(model, adamw, path / "none"), "not a run folder"),
        (lambda: ff.save(model, adamw, path, overwrite=True), "no checkpoint, and not empty"),
    ):
        with pytest.raises(ff.UserError, match=told):
            call()
    assert (path / "mine.txt").read_text() == "of the user"
    ff.save(model, one, path / "a", overwrite=True)
    ff.load(model, turned, path / "a")
    ff.save(model, None, path / "weights", state={"step": 5})
    assert ff.load(model, None, path / "weights") == {"step": 5}
    with pytest.raises(ff.UserError, match="without an optimizer"):
        ff.load(model, one, path / "weights")
    return True


def exported(layout: str, name: str, path: Path) -> Arrays:
    """A step, then both ways to a Hugging Face folder, and what the model gives."""
    model = ff.parallelize(build(name), layout)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))
    (path / "pretrained").mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        (path / "pretrained" / "tokenizer.json").write_text("{}")
        (path / "pretrained" / "model-00001-of-00002.safetensors").write_text("an older one")
    dist.barrier()
    model.save_pretrained(path / "pretrained")
    ff.export(model, path / "exported", dtype="fp32")
    with pytest.raises(ff.UserError, match="not empty"):
        ff.export(model, path / "exported")
    with pytest.raises(ff.UserError, match="not known"):
        ff.export(model, path / "other", dtype="int8")
    return as_numpy(ff.gather(model))


def text(layout: str, name: str) -> tuple[Any, ...]:
    """Logits of odd rows, the loss of unequal batches, and a continuation; twice, with a step of training between."""
    model = ff.parallelize(build(name), layout)
    rng = np.random.default_rng(5)
    rows, batches = plain(rng, 2, 7), share(0, model.data_rank, model.data_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        with exact():
            logits = ff.logits(model, {"input_ids": rows["input_ids"]})
            loss = ff.evaluate(model, batches)
            tokens = ff.generate(model, rows["input_ids"][0], max_new_tokens=4, temperature=0, eos_token_ids=())
        found += [logits.numpy(), loss, tokens]
        model.eval()
        run(model, optimizer, range(1))
    return tuple(found)


def text_of_one_process(name: str) -> tuple[Any, ...]:
    """The same by plain `transformers`."""
    from tests.api.loop import mean_loss

    model = build(name)
    rng = np.random.default_rng(5)
    rows, batches = plain(rng, 2, 7), share(0, 0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        with exact(), torch.no_grad():
            logits = model(input_ids=rows["input_ids"], use_cache=False).logits
            loss = float(mean_loss(model, batches))
            ids = rows["input_ids"][:1]
            for _ in range(4):
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        found += [logits.numpy(), loss, ids[0, 7:].tolist()]
        with exact():
            mean_loss(model, batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return tuple(found)


def weights_of(folder: Path, dtype: torch.dtype) -> Arrays:
    """As `transformers` loads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == dtype
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
