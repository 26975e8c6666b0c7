"""What users may try that cannot be right, on one rank of a world, with what they are told."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import JetMoeConfig, JetMoeForCausalLM, PreTrainedTokenizerFast

import fivefold as ff
from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.verification.by_hand import exact
from tests.api.loop import CLIP, build, mean_loss, plain
from tests.api.optimizers import Prodigy
from tests.parity import VOCABULARY

Batch = dict[str, Any]


def model_and_batch(layout: str, name: str = "llama") -> tuple[Any, Batch]:
    """All ranks have the same rows."""
    return ff.parallelize(build(name), layout), plain(np.random.default_rng(3), 2, 11)


def refuses(match: str) -> Any:
    return pytest.raises(ff.UserError, match=match)


def expected_step(name: str, copies: int) -> tuple[float, float]:
    """Loss and norm of one process over the rows of all data ranks."""
    model, batch = build(name), plain(np.random.default_rng(3), 2, 11)
    with exact():
        loss = mean_loss(model, [batch] * copies)
        loss.backward()
    return loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))


def plain_calls(layout: str, name: str) -> tuple[list[float], int]:
    """Backward of whatever the model gives; and a step that is right after all of it."""
    model, batch = model_and_batch(layout, name)
    piped = model.layout.pp > 1
    even = {key: value[:, :8] for key, value in batch.items()}
    calls = [
        lambda: model(**even).loss.backward(),
        lambda: (model(**even).logits.float().square().mean() / 4).backward(),
    ]
    for call in calls:
        with refuses("rank has only some of the model's layers" if piped else "outside of fivefold"):
            call()
    with refuses("called by itself"):
        model.model(input_ids=even["input_ids"])
    with refuses("some of the model's layers" if piped else "output_hidden_states"):
        model(**even, output_hidden_states=True)
    with torch.no_grad(), refuses("ff.logits") if piped else torch.no_grad():
        model(**even)
    assert all(parameter.grad is None for parameter in model.parameters())
    if model.layout.world > model.layout.dp_replicate:
        model.backward(batch)
        for clip in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
            lambda: next(p.grad for p in model.parameters() if p.grad is not None).norm(),
        ):
            with refuses("ff.clip_grad_norm_"):
                clip()
        model.zero_grad()
    hidden = torch.zeros(1, 4, 32, dtype=torch.float64)
    for part in ("lm_head", "model.layers.0", "model.embed_tokens"):  # calls that end in the middle of something
        with suppress(Exception):
            model.get_submodule(part)(hidden if part != "model.embed_tokens" else even["input_ids"][:, :3])
    with exact():
        result = ff.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, max_grad_norm=CLIP)
    return [result.loss, result.grad_norm], model.data_ranks


def numbers(layout: str) -> bool:
    """Numbers that a loop reads from gradients and weights by hand; and hooks that step while backward runs."""
    model, batch = model_and_batch(layout, "tied" if layout == "pp2" else "llama")
    model.backward(batch)
    norm = float(ff.clip_grad_norm_(model, math.inf))
    # On a pipeline rank, one that it has.
    name, parameter = next((name, p) for name, p in model.named_parameters() if p.ndim == 2)
    whole: Any = {"weight": ff.gather(model)[name], "gradient": ff.gather(model, gradients=True)[name]}
    is_whole = layout == "dp2"
    reads: list[tuple[Callable[[Tensor], float], str]] = [
        (lambda g: g.norm(2).item(), "gradient"),
        (lambda g: g.detach().data.norm(2).item(), "gradient"),
        (lambda g: float(g.pow(2).sum()), "gradient"),
        (lambda g: g.abs().max().item(), "gradient"),
        (lambda g: float((g**2).mean()), "gradient"),
        (lambda g: float(g.sum(0).square().sum()), "gradient"),
        (lambda p: p.norm().item(), "weight"),
        (lambda p: p.detach().clone().pow(2).sum().item(), "weight"),
    ]
    for read, of in reads:
        part = parameter if of == "weight" else parameter.grad
        if is_whole:
            assert read(part) == pytest.approx(read(whole[of]), rel=1e-12)
        else:
            with refuses(r"ff\.clip_grad_norm_\(model, max_norm\)"):
                read(part)
    if is_whole:
        assert float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) == pytest.approx(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        hook = register(lambda *_: print(parameter.grad.pow(2).sum().item()))
        with nullcontext() if is_whole else refuses(r"ff\.clip_grad_norm_"):
            optimizer.step()
        hook.remove()
    for of in (parameter, parameter.grad):
        with nullcontext() if is_whole else refuses(r"ff\.clip_grad_norm_"):
            optimizer.step(lambda of=of: of.norm().item())
    optimizer.step(lambda: model.backward(batch))
    optimizer.step()
    with nullcontext() if is_whole else refuses(r"ff\.clip_grad_norm_"):
        optimizer.state[parameter]["exp_avg_sq"].sum().item()
    with nullcontext() if is_whole else refuses(r"ff\.clip_grad_norm_"):
        parameter.grad.norm().item()
    kept = io.BytesIO()
    torch.save([optimizer.state_dict()["state"], [p.detach().clone() for p in model.parameters()]], kept)
    assert b"guard" not in kept.getvalue()
    refused = {name for name, p in model.named_parameters() if not _takes_hook(p)}
    sums = {"tp2": set(state_of(model).plan.gradient_sums), "pp2": {"model.embed_tokens.weight"}}
    assert refused == sums.get(layout, set())
    return True


def edits(layout: str) -> bool:
    """Changes of a gradient by hand: each is that of the whole tensor, or refused and without effect."""
    model, batch = model_and_batch(layout)
    model.backward(batch)
    name, parameter = next((name, p) for name, p in model.named_parameters() if p.ndim == 2)
    whole, kept = ff.gather(model, gradients=True)[name], parameter.grad.clone()
    rows = torch.arange(len(whole)).unsqueeze(1).expand(whole.shape)
    mask = {name: (rows % 3 == 1).double()}
    by_place: list[Callable[[Any], Any]] = [
        lambda g: g.mul_(0.5),
        lambda g: g.clamp_(-1e-3, 1e-3),
        lambda g: g.copy_(torch.where(g.abs() > 1e-3, g.sign(), g)),
        lambda g: torch._foreach_mul_([g], 0.5),
        lambda g: g.mul_(mask[name] if g is not parameter.grad else ff.scatter(model, mask)[name]),
    ]
    of_the_whole: list[Callable[[Any], Any]] = [
        lambda g: g.copy_(nn.functional.normalize(g, dim=1)),
        lambda g: g.copy_((100 * g).softmax(1)),
        lambda g: g.copy_(g.cumsum(1)),
        lambda g: g.copy_(g * (g.abs() > g.abs().sort(1).values[:, 3:4])),
        lambda g: g.copy_(g.tril()),
        lambda g: g.copy_(g.t().contiguous().t()),
        lambda g: g.copy_(nn.functional.mse_loss(g, torch.zeros_like(g), reduction="sum").sqrt() * g),
        lambda g: g[5].zero_(),
        lambda g: g[5:].mul_(0.5),
        lambda g: g.data[5].zero_(),
        lambda g: g.narrow(0, 0, 3).zero_(),
        lambda g: g.chunk(2)[0].zero_(),
        lambda g: g.t()[:, 3].zero_(),
        lambda g: g.__setitem__(5, g[6]),
        lambda g: g.mul_(float(g.norm())),
        lambda g: g.add_(g, alpha=g.square().sum()),
        lambda g: g.copy_(nn.functional.mse_loss(g, torch.zeros_like(g)).sqrt() * g),  # over 101 rows
        lambda g: g.normal_(),
        lambda g: g.add_(torch.randn_like(g)),
        lambda g: g.copy_(nn.functional.dropout(g, 0.5)),
    ]
    refusals = []
    for edit in (*by_place, *of_the_whole):
        torch.manual_seed(3)
        expected, was_refused = whole.clone(), False
        edit(expected)
        torch.manual_seed(3)
        try:
            with torch.no_grad():
                edit(parameter.grad)
        except ff.UserError:
            was_refused = True
        refusals.append(was_refused)
        torch.testing.assert_close(
            ff.gather(model, gradients=True)[name],
            whole if was_refused else expected,
            rtol=1e-12,
            atol=0,
            msg=lambda said: f"{layout}, edit {len(refusals) - 1}: {said}",
        )
        parameter.grad.copy_(kept)
    is_whole = layout == "dp2"
    assert refusals == [False] * len(by_place) + [not is_whole] * len(of_the_whole)
    with refuses("no parameter is called x"):
        ff.scatter(model, {"x": whole})
    with refuses("has the shape"):
        ff.scatter(model, {name: whole[:1]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    with nullcontext() if is_whole else refuses(r"ff\.clip_grad_norm_"):
        parameter.grad.norm().item()
    return True


def _takes_hook(parameter: Tensor) -> bool:
    try:
        parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    except ff.UserError:
        return False
    return True


def other_parameters(layout: str, precision: str) -> bool:
    """What stands in the place of a parameter would be passed over; a hook for its gradient would not be called."""
    model: Any = ff.parallelize(build("llama"), layout, precision=precision)
    batch = plain(np.random.default_rng(3), 2, 8)
    head, doubled = model.lm_head, {name: 2 * each.detach() for name, each in model.named_parameters()}
    with refuses(r"model\.embed_tokens\.weight is another tensor"):
        torch.func.functional_call(model, doubled, (batch["input_ids"],))
    right, own = ff.evaluate(model, batch), head.weight
    head.weight = nn.Parameter(2 * own.detach())
    with refuses(r"lm_head\.weight is another tensor than the one that ff\.parallelize put there"):
        ff.train_step(model, torch.optim.SGD(model.parameters()), batch)
    head.weight, model.lm_head = own, nn.Linear(*reversed(head.weight.shape), bias=False)
    with refuses(r"lm_head\.weight is another tensor"):
        model.backward(batch)
    model.lm_head = head
    if dist.get_world_size() > 1:
        with refuses("register_hook"):
            own.register_hook(torch.zeros_like)
        with refuses(r"parameter\.data = values would change nothing"):
            own.data = 2 * own.data
        with torch.no_grad():  # what changes a part where it lies is right
            own.data.mul_(2)
            assert ff.evaluate(model, batch) != right
            own.copy_(copy.deepcopy(own) / 2)
        assert ff.evaluate(model, batch) == right and isinstance(own, nn.Parameter)
        torch.utils.swap_tensors(own, nn.Parameter(2 * own.detach()))
        with refuses(r"lm_head\.weight is another tensor"):
            ff.evaluate(model, batch)
        return True
    return ff.evaluate(model, batch) == right


def called_around() -> bool:
    """Hooks of the whole model, and a forward of its own, before `parallelize` and after; those of parts are called."""
    batch = plain(np.random.default_rng(3), 2, 8)

    def halved(*args: Any) -> Any:
        return {**args[-1], "logits": args[-1]["logits"] / 2}

    plain_model = build("llama")
    hooks = [plain_model.register_forward_hook(halved)]
    model: Any = ff.parallelize(plain_model, "single")
    for also in (None, model.register_forward_hook, model.register_forward_pre_hook):
        hooks += [] if also is None else [also(halved)]
        for call in (lambda: ff.evaluate(model, batch), lambda: ff.logits(model, batch), lambda: model.backward(batch)):
            with refuses("the whole model has a forward hook"):
                call()
        hooks.pop().remove()
    right = ff.evaluate(model, batch)
    own = type(model).forward
    model.forward = lambda *args, **kwargs: halved(own(model, *args, **kwargs))
    with refuses("or a forward of its own"):
        ff.evaluate(model, batch)
    del model.forward
    with model.lm_head.register_forward_hook(lambda *args: args[-1] / 2):
        changed = ff.evaluate(model, batch)
    return ff.evaluate(model, batch) == right != changed


def inside(layout: str) -> bool:
    """What a user puts inside of a model: another attention, and hooks, before `parallelize` and after."""
    batch = plain(np.random.default_rng(3), 2, 8)
    plain_model = build("llama")
    early = plain_model.model.layers[0].register_forward_hook(lambda *_: None)
    model: Any = ff.parallelize(plain_model, layout)

    def calls() -> None:
        model.backward(batch)
        model.zero_grad()
        with torch.no_grad():
            ff.evaluate(model, batch)
            ff.logits(model, {"input_ids": batch["input_ids"]})
            if model.layout.pp == 1:
                model(input_ids=batch["input_ids"])

    def each_refuses(match: str) -> None:
        for call in (
            lambda: model.backward(batch),
            lambda: ff.evaluate(model, batch),
            lambda: ff.generate(model, [1, 2]),
            lambda: model(input_ids=batch["input_ids"]),
        ):
            with torch.enable_grad(), refuses("some of the model's layers|" + match):
                call()

    looks_at_parts = model.layout.tp > 1 or model.layout.cp > 1
    if looks_at_parts:
        each_refuses(r"model\.layers\.0 has a hook")
    early.remove()
    calls()
    ours = model.config._attn_implementation
    for other in ("eager", "sdpa"):
        model.set_attn_implementation(other)
        if model.layout.world > 1:
            each_refuses(rf"other attention \({other}\) .* ranks.*\n?.*set_attn_implementation")
    model.set_attn_implementation(ours)
    calls()

    def add(*_: Any) -> None:
        ran.append(1)

    ran = list[int]()
    for name in ("lm_head", "model.layers.1.mlp") if looks_at_parts else ():
        module = model.get_submodule(name)
        for register in (
            module.register_forward_hook,
            module.register_forward_pre_hook,
            module.register_full_backward_hook,
        ):
            with register(add):
                each_refuses(rf"{name} has a hook, which under .*{layout}.*(.*\n)*.*is_elementwise = True")
    assert not ran
    vars(add).update(is_elementwise=True)
    with model.lm_head.register_forward_hook(add):
        calls()
    return bool(ran) or model.layout.pp > 1


def methods(layout: str) -> bool:
    """Methods of `transformers` and torch that would give or take parts for wholes."""
    model, _ = model_and_batch(layout)
    some, rows = torch.optim.AdamW(model.lm_head.parameters()), plain(np.random.default_rng(3), 2, 8)
    assert not any(ff.train_step(model, some, rows).skipped for _ in range(2))  # no gradient of others is left
    for call, line in (
        (lambda: model.state_dict(), "ff.save"),
        (lambda: model.load_state_dict({}), "ff.load"),
        (lambda: model.generate(torch.zeros(1, 3, dtype=torch.int64)), "ff.generate"),
        (lambda: model.half(), "precision"),
        (lambda: model.to(torch.bfloat16), "precision"),
        (lambda: model.gradient_checkpointing_enable(), r"\+full"),
        (lambda: model.resize_token_embeddings(7), "before ff.parallelize"),
        (lambda: model.push_to_hub("me/mine"), "save_pretrained"),
        (lambda: pickle.dumps(model), "ff.export"),
        (lambda: copy.deepcopy(model), "averages of the weights"),
        (lambda: model.model.state_dict(), "ff.gather"),
        (lambda: model.lm_head.state_dict(), "ff.gather"),
        (lambda: model.get_input_embeddings()(torch.zeros(1, 4, dtype=torch.int64)), "some of its tokens"),
        (lambda: ff.parallelize(build("llama"), None), "the layout is a NoneType"),
        (lambda: ff.parallelize(build("llama"), f"{layout}+8bit_states"), "keeps its own"),
        (lambda: ff.parallelize(model, layout), "parallelized already"),
        (lambda: ff.train_step(nn.Linear(2, 2), None, {}), "ff.parallelize"),
    ):
        with refuses(line):
            call()
    assert model.to("cpu") is model.double()
    assert model.num_parameters() == sum(p.numel() for p in build("llama").parameters())
    with refuses("nosp"):
        model(inputs_embeds=torch.zeros(1, 4, 32, dtype=torch.float64))
    return True


def batches(layout: str) -> bool:
    """Batches that are not what they should be, on one rank alone or on all: every rank is told."""
    model, batch = model_and_batch(layout)
    ids = batch["input_ids"]
    mask = torch.ones_like(ids)
    hole, left, odd = mask.clone(), mask.clone(), mask.clone()
    hole[0, 4], left[0, :2], odd[0, 0] = 0, 0, 2
    restart = torch.arange(11).remainder(6).expand(2, -1)
    high, low = ids.clone(), batch["labels"].clone()
    high[0, 0], low[0, 0] = VOCABULARY, -1
    for wrong, told in (
        ({"input_ids": ids}, "no labels"),
        (batch | {"labels": ids.float()}, r"labels.long\(\)"),
        (batch | {"labels": ids[:, :4]}, "labels has shape"),
        ({"input_ids": ids[0], "labels": ids[0]}, "unsqueeze"),
        (batch | {"input_ids": high}, f"vocabulary is {VOCABULARY}"),
        (batch | {"labels": low}, "-100"),
        (batch | {"attention_mask": hole}, "middle of row 0"),
        (batch | {"attention_mask": left}, "predicted from padding"),
        (batch | {"attention_mask": odd}, "0 and 1"),
        (batch | {"attention_mask": mask, "position_ids": restart}, "leave attention_mask out"),
        (batch | {"token_type_ids": ids}, "token_type_ids"),
        (batch | {"position_ids": -restart}, "negative"),
        ({"input_ids": ids.tolist(), "labels": ids}, "torch.tensor"),
        (ids, "dict of tensors"),
        ([], "no rank has a micro batch"),
    ):
        with refuses(told):
            model.backward(wrong)
    with torch.no_grad(), refuses("gradients are off"):
        model.backward(batch)
    with refuses(r"rank 1 \(.*\): the batch has no labels"):
        model.backward({"input_ids": ids} if dist.get_rank() else batch)
    mine = {key: value + dist.get_rank() for key, value in batch.items()}
    if model.data_ranks == 1:
        for call in (model.backward, lambda each: ff.evaluate(model, each), lambda each: ff.logits(model, each)):
            with refuses("data rank 0 were given different batches"):
                call(mine)
        with refuses("data rank 0 were given different batches"):
            model.backward(batch | {"labels": mine["labels"]})
        with refuses("the prompt is "):
            ff.generate(model, [1 + dist.get_rank()])
        for option in ("max_new_tokens", "temperature", "seed"):
            with refuses(f"{option} is "):
                ff.generate(model, [1], **{option: 1 + dist.get_rank()})
    with refuses("no rank has a micro batch"):
        ff.evaluate(model, [])
    with refuses("the prompt has no tokens"):
        ff.generate(model, [])
    with refuses("logits takes one micro batch"):
        ff.logits(model, [batch])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.isfinite(model.backward(batch))
    return True


def optimizers(layout: str) -> bool:
    """Optimizers whose update would be lost, or wrong on parts."""
    plain_model = build("llama")
    early = torch.optim.AdamW(plain_model.parameters())
    model, batch = ff.parallelize(plain_model, layout), plain(np.random.default_rng(3), 2, 11)
    model.backward(batch)
    with refuses("after the model"):
        early.step()
    with refuses("gradients from before"):
        ff.train_step(model, torch.optim.SGD(model.parameters()), batch)
    parts = model.layout.dp_replicate == 1
    matrices = [p for p in model.parameters() if p.ndim == 2]
    if parts:
        for wrong in (torch.optim.Adafactor(model.parameters()), torch.optim.Muon(matrices)):
            with refuses("depends on others of the tensor"):
                wrong.step()
        with refuses("closure"):
            torch.optim.LBFGS(model.parameters()).step(lambda: torch.zeros(()))
        for wrong in (GlobalClip(model.parameters(), lr=0.1), Prodigy(model.parameters())):
            with refuses("depends on other tensors"):
                wrong.step()
    with refuses("are DTensors"):
        torch.optim.Rprop(model.parameters()).step()
    model.zero_grad()
    extra = nn.Parameter(torch.zeros(2))
    for wrong, told in (
        (early, "after the model"),
        (torch.optim.SGD([*model.parameters(), extra]), "not those of the parallelized model"),
        (torch.amp.GradScaler("cpu"), "GradScaler is needed"),
        (None, "NoneType"),
    ):
        with refuses(told):
            ff.train_step(model, wrong, batch)
    with refuses("no norm"):
        ff.train_step(model, torch.optim.SGD(model.parameters()), batch, max_grad_norm=-1.0)
    with refuses("no norm"):
        ff.clip_grad_norm_(model, 0.0)
    sign = Sign(model.parameters(), lr=0.1)  # of someone else's making: tried, and right
    assert not ff.train_step(model, sign, batch).skipped
    return True


class GlobalClip(torch.optim.SGD):
    """Clips by the norm of all that it was given: on a rank, of parts."""

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.1 / sum(float(local(p.grad).square().sum()) for p in every) ** 0.5
        for p in every:
            p.grad.mul_(min(scale, 1.0))
        return super().step(closure)


def other_weights(layout: str) -> bool:
    """Ranks that built different models, by another seed, or froze other parameters."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += dist.get_rank()
    with refuses(r"the weights of: .*\.weight is \d+ on rank 0 \(.*\), and \d+ on rank 1 \("):
        ff.parallelize(model, layout)
    model = build("llama")
    model.model.norm.weight.requires_grad_(dist.get_rank() == 0)
    with refuses(r"the training of: model\.norm\.weight is .*, trained on rank 0 \(.*\), and .*, frozen on rank 1"):
        ff.parallelize(model, layout)
    ff.parallelize(build("llama"), layout)
    return True


class Sign(torch.optim.Optimizer):
    """Moves every element by its gradient's sign."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"])


def one_process() -> bool:
    """On one process a plain backward is right, is not refused, and is exactly that of the library."""
    model, batch = model_and_batch("single")
    loss: Tensor = model(**batch).loss
    loss.backward()
    bare = ff.gather(model, gradients=True)
    model.zero_grad()
    assert float(model.backward(batch)) == pytest.approx(float(loss), rel=1e-6)
    for name, gradient in ff.gather(model, gradients=True).items():
        torch.testing.assert_close(bare[name], gradient, rtol=1e-5, atol=1e-7)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    made = model.generate(batch["input_ids"][:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made[0, 11:].tolist() == ff.generate(model, batch["input_ids"][0], max_new_tokens=5, temperature=0)[:5]
    stop_strings(model, batch["input_ids"][0])
    return True


def stop_strings(model: Any, ids: Tensor) -> None:
    """They end tokens and texts where `transformers` ends them; a text leaves them out."""
    letters = [chr(ord("a") + token) for token in range(VOCABULARY)]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(letters, range(VOCABULARY), strict=True)), "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    greedy: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0, "eos_token_ids": ()}
    plain = ff.generate(model, ids, **greedy)
    model.generation_config.stop_strings = ["never", letters[plain[2]]]
    made = model.generate(ids[None], max_new_tokens=5, do_sample=False, pad_token_id=0, tokenizer=tokenizer)
    assert ff.generate(model, ids, tokenizer=tokenizer, **greedy) == made[0, len(ids) :].tolist()
    text = "".join(letters[each] for each in ids.tolist())
    left = plain[: plain.index(plain[2])]
    assert ff.generate(model, text, tokenizer=tokenizer, **greedy) == "".join(letters[each] for each in left)
    with refuses("stop_strings is .* no tokenizer"):
        ff.generate(model, ids)


def budgets() -> bool:
    """A budget of recompute is spent for the rows of a step, and changes no number."""
    model, batch = model_and_batch("tp2")
    expected, layout = float(model.backward(batch)), "tp2+keep0.001GiB"
    with refuses(r"a budget of 0\.001GiB is spent for rows and micro batches that are known"):
        ff.parallelize(build("llama"), layout)
    with refuses("step .* is no step"):
        ff.parallelize(build("llama"), layout, step=(11, 0))
    spent = ff.parallelize(build("llama"), layout, step=(600, 1))
    assert set(spent.fivefold.plan.recompute.by_layer.values()) & {"selective", "full"}
    assert float(spent.backward(batch)) == expected
    for name, gradient in ff.gather(model, gradients=True).items():
        assert torch.equal(ff.gather(spent, gradients=True)[name], gradient), name
    return True


def jetmoe() -> bool:
    options = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "kv_channels": 8}
    config = JetMoeConfig(**options, num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    with refuses("no routers that give logits"):
        ff.parallelize(JetMoeForCausalLM(config), "single")
    config.output_router_logits = False
    ff.parallelize(JetMoeForCausalLM(config), "single")
    return True
