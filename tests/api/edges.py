"""What loops do at the edges, on one rank of a world."""

from typing import Any

import numpy as np
import pytest
import torch

import fivefold as ff
from fivefold.verification.by_hand import exact
from tests.api.loop import CLIP, as_numpy, build, mean_loss, plain, share
from tests.parity import Case, reference_model

Arrays = dict[str, np.ndarray]


def accumulated(layout: str, name: str) -> Arrays:
    """Three backward passes without a step between them."""
    model = ff.parallelize(build(name), layout)
    for at in range(2):
        with exact():
            model.backward(share(at, model.data_rank, model.data_ranks))
    with exact():
        model.backward(plain(np.random.default_rng(1), 1, 4))
    return as_numpy(ff.gather(model, gradients=True))


def accumulated_in_one_process(name: str, data_ranks: int) -> Arrays:
    model = build(name)
    for at in range(2):
        with exact():
            mean_loss(model, share(at, 0, 1)).backward()
    with exact():
        mean_loss(model, [plain(np.random.default_rng(1), 1, 4)] * data_ranks).backward()
    return gradients_of(model)


def gradients_of(model: Any) -> Arrays:
    return {name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy() for name, p in model.named_parameters()}


def evaluated(layout: str) -> tuple[float, float, list[bool]]:
    """(the loss of a batch forward only, that of a step on it, the model's modes after each kind of evaluation)."""
    model = ff.parallelize(build("llama"), layout)
    batch, modes = share(0, model.data_rank, model.data_ranks), []
    for mode in (False, True):
        model.train(mode)
        loss = ff.evaluate(model, batch)
        modes.append(model.training)
    return loss, ff.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch).loss, modes


def inferred(layout: str, call: str) -> bool:
    """Steps after a first call in inference mode are those of a model that was not called."""
    batch, found = plain(np.random.default_rng(1), 2, 8), []
    calls: dict[str, Any] = {
        "none": lambda _: None,
        "evaluate": lambda model: ff.evaluate(model, batch),
        "logits": lambda model: ff.logits(model, {"input_ids": batch["input_ids"]}),
        "generate": lambda model: ff.generate(model, [1, 2, 3], max_new_tokens=2),
        "a plain forward": lambda model: model.layout.pp > 1 or model(input_ids=batch["input_ids"]),
        "parallelize": lambda model: None,
    }
    for each in ("none", call):
        with torch.inference_mode(each == "parallelize"):
            model = ff.parallelize(build("llama"), layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch.inference_mode():
            calls[each](model)
        found.append([ff.train_step(model, optimizer, batch).loss for _ in range(2)])
    return found[0] == found[1]


def freeze(model: Any, what: str) -> None:
    """`what`: the first half of the model, or all but its head, or all but its embedding."""
    kept = {"but the head": ("lm_head",), "but the embedding": ("embed_tokens",)}.get(
        what, ("layers.1", "layers.2", "norm", "lm_head")
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(each in name for each in kept))


def frozen(layout: str, what: str, late: bool) -> tuple[float, Arrays, Arrays, list[str]]:
    """A step of a model of which a part is frozen: before `ff.parallelize`, or after it and a first forward."""
    model: Any = build("llama")
    if not late:
        freeze(model, what)
    model = ff.parallelize(model, layout)
    if late:
        with torch.no_grad():
            ff.logits(model, plain(np.random.default_rng(1), 1, 4))
        freeze(model, what)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad] or model.parameters(), lr=1e-2)
    times = 2 if "zb" in layout else 1  # the mean stays, and the rounds of micro batches are whole
    batch = times * share(0, model.data_rank, model.data_ranks)
    with exact():
        model.backward(batch)
    odd = [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    gradients = as_numpy(ff.gather(model, gradients=True))
    optimizer.zero_grad()
    with exact():
        norm = ff.train_step(model, optimizer, batch, max_grad_norm=CLIP).grad_norm
    return norm, gradients, as_numpy(ff.gather(model)), odd


def frozen_in_one_process(what: str) -> tuple[float, Arrays, Arrays]:
    model = build("llama")
    freeze(model, what)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with exact():
        mean_loss(model, share(0, 0, 1)).backward()
    gradients = {name: values.copy() for name, values in gradients_of(model).items()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    optimizer.step()
    return norm, gradients, {name: p.detach().numpy() for name, p in model.named_parameters()}


def unfrozen(layout: str) -> bool:
    """Gradients in bf16 of a model whose first layer was wholly frozen until after a step are those of one that was
    not."""
    found = []
    for is_frozen in (True, False):
        model: Any = build("llama").float()
        model.model.layers[0].requires_grad_(not is_frozen)
        model = ff.parallelize(model, layout, precision="bf16")
        batch = share(0, model.data_rank, model.data_ranks)
        model.backward(batch)
        model.zero_grad()
        model.requires_grad_(True)
        model.backward(batch)
        found.append(as_numpy(ff.gather(model, gradients=True)))
    first, second = found
    assert first.keys() == second.keys() and any("layers.0." in name and values.any() for name, values in first.items())
    return all((first[name] == second[name]).all() for name in first)


def skipped(layout: str) -> bool:
    """Steps that must change nothing: without a target anywhere, and with a gradient that is not finite."""
    model = ff.parallelize(build("llama"), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    batch = plain(np.random.default_rng(1), 2, 6)
    before = ff.gather(model)
    none = batch | {"labels": torch.full_like(batch["labels"], -100)}
    result = ff.train_step(model, optimizer, none, max_grad_norm=1.0)
    assert result.skipped and result.targets == 0 and np.isnan(result.loss)
    assert all(torch.equal(ff.gather(model)[name], values) for name, values in before.items())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                parameter.mul_(1e200)
    broken = ff.gather(model)
    result = ff.train_step(model, optimizer, batch, max_grad_norm=1.0)
    assert result.skipped and result.targets == 10 * model.data_ranks
    assert all(torch.equal(ff.gather(model)[name], values) for name, values in broken.items())
    return not optimizer.state


def rates(layout: str) -> list[float]:
    """The optimizer's own rates, and one that is given."""
    model = ff.parallelize(build("llama"), layout, precision="fp32")
    named = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": named[:2], "lr": 0.5}, {"params": named[2:], "lr": 0.25}])
    batch = plain(np.random.default_rng(1), 2, 6)
    found = []
    for rate in (None, 0.125):
        ff.train_step(model, optimizer, batch, learning_rate=rate)
        found += [group["lr"] for group in optimizer.param_groups]
    return found


def routed(layout: str, cut: bool) -> tuple[float, float, float, list[list[int]]]:
    """A step of a model that asks for the loss of uneven experts. `cut`: rows without their padding, one by one."""
    model: Any = build("moe")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.7
    model = ff.parallelize(model, layout)
    batch = share(0, model.data_rank, model.data_ranks)
    if cut:
        batch = [row for each in batch for row in without_padding(each)]
    with exact():
        result = ff.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert result.balance is not None
    rows = [list(layer) for layer in result.balance.tokens_per_expert]
    return result.grad_norm, result.balance.load, result.balance.z, [[result.tokens, result.targets], *rows]


def without_padding(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row of a batch as a batch of its own."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    kept = {key: values for key, values in batch.items() if key != "attention_mask"}
    return [{key: values[row][mask[row]][None] for key, values in kept.items()} for row in range(len(mask))]


def layouts_of_whole_tensors(layout: str) -> bool:
    """Optimizers that look at whole tensors, where ranks have them: the same on both and as in one process."""
    found = []
    for make in (lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.1),):
        alone: Any = build("llama")
        model = ff.parallelize(build("llama"), layout)
        optimizer, other = make(list(model.parameters())), make(list(alone.parameters()))
        batch = plain(np.random.default_rng(1), 2, 6)
        for _ in range(2):
            with exact():
                ff.train_step(model, optimizer, batch)
                mean_loss(alone, [batch]).backward()
            other.step()
            alone.zero_grad()
        ours, theirs = ff.gather(model), dict(alone.named_parameters())
        with pytest.raises(ff.UserError, match="DTensors"):
            torch.optim.Adafactor(model.parameters()).step()
        found += [torch.allclose(ours[name], theirs[name].detach(), rtol=1e-3, atol=1e-5) for name in theirs]
    return all(found)


def looked_at_between(layout: str) -> list[np.ndarray]:
    """Plain forwards before and after the optimizer's step: what was gathered for one must not serve the next."""
    model = ff.parallelize(build("llama"), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = plain(np.random.default_rng(1), 2, 8)
    found = []
    with exact():
        model.backward(batch)
        for _ in range(2):
            with torch.no_grad():
                found.append(model(input_ids=batch["input_ids"]).logits.numpy())
            optimizer.step()
    return found


def looked_at_in_one_process(data_ranks: int) -> list[np.ndarray]:
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = plain(np.random.default_rng(1), 2, 8)
    found = []
    with exact():
        mean_loss(model, [batch] * data_ranks).backward()
        for _ in range(2):
            with torch.no_grad():
                found.append(model(input_ids=batch["input_ids"], use_cache=False).logits.numpy())
            optimizer.step()
    return found


def packed_forward(layout: str) -> np.ndarray:
    """A plain call with positions that restart."""
    model = ff.parallelize(build("llama"), layout)
    with torch.no_grad(), exact():
        return np.asarray(model(**packed_rows(), use_cache=False).logits.numpy())


def packed_apart(family: str, changes: tuple[tuple[str, Any], ...]) -> None:
    """A plain call and its backward, with recompute: a document's logits are those that it has alone."""
    case = Case("single", family, overrides=changes)
    model = ff.parallelize(reference_model(case), "single+full")
    ids = torch.arange(1, 21).unsqueeze(0)
    with exact():
        found = model(input_ids=ids, position_ids=torch.tensor([[*range(12), *range(8)]])).logits
        found.sum().backward()
        with torch.no_grad():
            alone = [model(input_ids=each, use_cache=False).logits for each in ids.split([12, 8], 1)]
    np.testing.assert_allclose(found.detach().numpy(), torch.cat(alone, 1).numpy(), rtol=1e-9, atol=1e-10)


def packed_rows() -> dict[str, torch.Tensor]:
    """A document of one token is among them: positions do not fall there."""
    rows = plain(np.random.default_rng(1), 2, 8)
    return {"input_ids": rows["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [*range(8)]])}
