"""One contender, in a process of its own: `python benchmarks/contenders.py REQUEST OUT` (started by training_speed.py).

REQUEST is JSON: `kind`, `shape` (a name of `SHAPES`), `precision`, `packed`, `warmup`, `steps`; for fivefold `layout`,
`compiled` and `apart` (each process trains its rows as if it were alone), for the Trainer `fsdp`: `off`, `asked`, or
`forced` (see `shards_on_cpu`).
Every contender reads the same rows, starts from the same weights, uses AdamW on fp32 masters and clips at 1. Its
peak memory is the peak resident set less what was resident before the model was built, with every import done.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import compact_loop
import plain_loop
from common import LEARNING_RATE, OPTIONS, SEED, SHAPES, Clock, best_gflops, micro_batch, plain_model
from fivefold.launch.world import alone, find_world, join, threads_per_worker
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.models.flops import Costs
from fivefold.ops.cpu.tuning import tune
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.inputs import squared_lengths
from fivefold.training.memory import PeakMemory
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SQUARE = 4096


def matmul(ask: dict[str, Any]) -> dict[str, Any]:
    """What matmuls alone reach on all cores, GFLOP/s: a large square one, and the model's own linears forward. By the
    faster of PyTorch's two libraries for them."""
    tune()
    torch.set_num_threads(threads_per_worker(1))
    shape, dtype = SHAPES[ask["shape"]], DTYPES[ask["precision"]]
    side = SQUARE if ask["shape"] != "tiny" else 256
    work = [(count * m * k * n, best_gflops(m, k, n, dtype)) for count, m, k, n in shape.matmuls()]
    layers = sum(flops for flops, _ in work) / sum(flops / rate for flops, rate in work)
    costs = Costs.of(facts_of(build_meta(shape.hf_config())))
    batch = [micro_batch(shape, 0, packed=ask["packed"])]
    flops_per_step = costs.per_token * shape.tokens + costs.per_squared_length * squared_lengths(batch)
    return {
        "square_gflops": best_gflops(side, side, side, dtype),
        "layers_gflops": layers,
        "parameters": costs.parameters,
        "flops_per_step": flops_per_step,
    }


def fivefold(ask: dict[str, Any]) -> dict[str, Any]:
    """`parallelize` and `train_step`, as `fivefold train` calls them."""
    shape, clock = SHAPES[ask["shape"]], Clock()
    world = find_world("cpu") or alone("cpu")
    with join(alone("cpu") if ask["apart"] else world):
        torch.set_num_threads(threads_per_worker(world.local_size))
        data_ranks = world.size if ask["apart"] else Layout.parse(ask["layout"]).data_ranks
        rows = shape.rows // data_ranks
        layout = Layout.parse(f"{ask['layout']}+mb{rows}" + ("+fp32" if ask["precision"] == "fp32" else ""))
        memory = PeakMemory(CPU)
        model = parallelize(
            build_meta(shape.hf_config()), layout, device=CPU, seed=SEED, compile_blocks=ask["compiled"]
        )
        optimizer = build_optimizer(model, OPTIONS)
        data_rank = world.rank if ask["apart"] else state_of(model).placement.data_rank
        clock.tick()
        for step in range(ask["warmup"] + ask["steps"]):
            batch = [micro_batch(shape, step, packed=ask["packed"], data_rank=data_rank, data_ranks=data_ranks)]
            done = train_step(model, optimizer, batch, learning_rate=LEARNING_RATE, max_grad_norm=OPTIONS.max_grad_norm)
            clock.tick(None if ask["apart"] else done.loss)  # of other rows than the others'
        return {**clock.result(warmup=ask["warmup"]), "peak_gib": memory.gib}


def plain(ask: dict[str, Any]) -> dict[str, Any]:
    """The loop of plain_loop.py."""
    return _alone(ask, plain_loop.train)


def compact(ask: dict[str, Any]) -> dict[str, Any]:
    """The model and the loop of compact_loop.py."""
    return _alone(ask, compact_loop.train, of=_compact)


def _compact(model: Any) -> compact_loop.Llama:
    found = compact_loop.Llama(model.config)
    found.take(model)
    return found


def _alone(ask: dict[str, Any], train: Callable[..., Any], of: Callable[[Any], Any] = lambda model: model) -> Any:
    """A loop that knows one process alone. `of`: what it trains, of a `transformers` model."""
    torch.set_num_threads(threads_per_worker(1))
    shape, clock, total = SHAPES[ask["shape"]], Clock(), ask["warmup"] + ask["steps"]
    memory = PeakMemory(CPU)
    model = of(plain_model(shape.hf_config()))
    batches = ([micro_batch(shape, step, packed=ask["packed"])] for step in range(total))
    clock.tick()
    for loss in train(
        model, batches, repeat(LEARNING_RATE), bf16=ask["precision"] == "bf16", betas=OPTIONS.betas, eps=OPTIONS.eps,
        weight_decay=OPTIONS.weight_decay, max_grad_norm=OPTIONS.max_grad_norm,
    ):  # fmt: skip
        clock.tick(loss)
    return {**clock.result(warmup=ask["warmup"]), "peak_gib": memory.gib}


def trainer(ask: dict[str, Any]) -> dict[str, Any]:
    """`transformers.Trainer`; unless `fsdp` is off, asked for FSDP2 through accelerate by its own arguments."""
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    shape, clock, total = SHAPES[ask["shape"]], Clock(), ask["warmup"] + ask["steps"]
    world = find_world("cpu") or alone("cpu")
    torch.set_num_threads(threads_per_worker(world.size))
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    with tempfile.TemporaryDirectory() as folder, shards_on_cpu() if ask["fsdp"] == "forced" else nullcontext():
        arguments = TrainingArguments(
            folder, use_cpu=True, bf16=ask["precision"] == "bf16", per_device_train_batch_size=shape.rows // world.size,
            max_steps=total, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", optim="adamw_torch_fused",
            adam_beta1=OPTIONS.betas[0], adam_beta2=OPTIONS.betas[1], adam_epsilon=OPTIONS.eps,
            weight_decay=OPTIONS.weight_decay, max_grad_norm=OPTIONS.max_grad_norm, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, dataloader_num_workers=0, **(fsdp if ask["fsdp"] != "off" else {}),
        )  # fmt: skip
        memory = PeakMemory(CPU)
        rows = [row for step in range(total) for row in micro_batch(shape, step, packed=False).input_ids]
        dataset = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in rows]
        own = InOrder(plain_model(shape.hf_config()), arguments, train_dataset=dataset, callbacks=[clock.callback()])
        own.train()
        wrapper = type(own.model_wrapped).__name__
    return {**clock.result(warmup=ask["warmup"]), "peak_gib": memory.gib, "wrapper": wrapper}


@contextmanager
def shards_on_cpu() -> Iterator[None]:
    """Inside, accelerate takes its FSDP2 path on CPU ranks too. By itself it knows FSDP for accelerators only, and on
    CPU wraps the model in DistributedDataParallel without a word (`AcceleratorState.__init__`, accelerate 1.15)."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not AcceleratorState._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            kwargs["cpu"] = False
        original(self, *args, **kwargs)

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "matmul": matmul,
    "fivefold": fivefold,
    "plain": plain,
    "compact": compact,
    "trainer": trainer,
}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(KINDS[request["kind"]](request)))
