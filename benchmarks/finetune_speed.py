"""Fine-tuning beside TRL and PEFT: tokens per second and peak memory of the same step, in one run.

    python benchmarks/finetune_speed.py                  writes results/finetune_speed.json and the table of
                                                         docs/evidence/benchmarks.md; some 20 minutes on 2 idle cores
    python benchmarks/finetune_speed.py --quick          a toy model, one repeat, writes nothing: does it run?
    python benchmarks/finetune_speed.py --only dpo       tasks whose name has this, on the screen alone
    python benchmarks/finetune_speed.py --chats          SmolLM2-135M learns from 90 chats (`finetune_chats.py`); writes
                                                         results/finetune_chats.json and a table of docs
    python benchmarks/finetune_speed.py --chats --processes 2   ... on two processes alone; the other rows stay
    python benchmarks/finetune_speed.py --chats --quick  ... with two layers and three steps, on the screen alone

Needs `trl` and `peft` (the `dev` extra). Tasks: supervised tuning of prompts and answers of unequal lengths, and DPO on
pairs; of the whole model, and of LoRA adapters of rank 16 beside all its linears. Both read the same records, 8 a step,
start from the same weights, use AdamW in fp32 and clip at 1. Log-probabilities of DPO's reference are known beforehand
on both sides (TRL: `precompute_ref_log_probs`). TRL pads the records of a micro batch to the longest, which is what it
does on a CPU; fivefold packs them into one row. Two processes: `shard2` here and DistributedDataParallel there.

Every contender runs in fresh processes; the two take turns, `repeats` times, in alternating order. A ratio is the
median over repeats of ours / theirs in the same repeat. Tokens are those of the records, without padding.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import finetune_chats as chats
from common import LEARNING_RATE, OPTIONS, RESULTS, SEED, SHAPES, Clock, machine, plain_model, run_ranks
from fivefold.config import ObjectiveSection
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.launch.world import alone, find_world, join, threads_per_worker
from fivefold.models.build import build_meta
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.memory import PeakMemory
from fivefold.training.optimizers import build_optimizer
from fivefold.training.preference import ObjectiveSpec
from fivefold.training.step import train_step
from pages import put_between

CPU = torch.device("cpu")
RESULT, DOCS = RESULTS / "finetune_speed.json", Path(__file__).parents[1] / "docs" / "evidence" / "benchmarks.md"
CHATS = RESULTS / "finetune_chats.json"
BEGIN, END = "<!-- table: python benchmarks/finetune_speed.py -->", "<!-- end of finetune_speed -->"
BEGIN_CHATS = "<!-- table: python benchmarks/finetune_speed.py --chats -->"
END_CHATS = "<!-- end of finetune_speed --chats -->"
TASKS = ("sft", "sft+lora", "dpo", "dpo+lora")
TRAINERS = ("fivefold", "trl")
RECORDS, WARMUP, RANK, ALPHA, BETA = 8, 2, 16, 32.0, 0.1


# ---- what both read --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Tokens of a prompt, and of its answers: one, or a chosen and a rejected one."""

    prompt: np.ndarray
    answers: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        """As many as a model reads: the prompt once for each answer."""
        return sum(len(self.prompt) + len(each) for each in self.answers)


def records(shape: Any, task: str, step: int) -> list[Record]:
    """Of a step, of all processes. Sequences have from a quarter of the shape's row to a whole one."""
    rng, longest = np.random.default_rng([SEED, step]), shape.length // 4
    found = []
    for _ in range(RECORDS):
        prompt, *answers = (
            rng.integers(0, shape.vocabulary, int(rng.integers(longest // 8, longest // 2)), dtype=np.uint16)
            for _ in range(3 if "dpo" in task else 2)
        )
        found.append(Record(prompt, tuple(answers)))
    return found


def before(step: int) -> np.ndarray:
    """Log-probabilities of the answers of a step under DPO's reference."""
    return np.random.default_rng([SEED, step, 1]).normal(-900, 10, (RECORDS, 2))


# ---- one process of a contender --------------------------------------------------------------------------------------


def fivefold(ask: dict[str, Any]) -> dict[str, Any]:
    """`parallelize` and `train_step`, as `fivefold train` calls them."""
    shape, clock, task, steps = SHAPES[ask["shape"]], Clock(), ask["task"], WARMUP + ask["steps"]
    with join(find_world("cpu") or alone("cpu")) as _:
        layout = Layout.parse(f"{'shard2' if ask['ranks'] == 2 else 'single'}+fp32")
        memory = PeakMemory(CPU)
        lora = Lora(rank=RANK, alpha=ALPHA) if "lora" in task else None
        model = parallelize(build_meta(shape.hf_config()), layout, device=CPU, seed=SEED, adapter=lora)
        optimizer = build_optimizer(model, OPTIONS)
        spec = ObjectiveSpec(
            ObjectiveSection(name="dpo", beta=BETA), np.concatenate([before(step) for step in range(steps)])
        )
        rank = state_of(model).placement.data_rank
        clock.tick()
        for step in range(steps):
            done = train_step(
                model, optimizer, [packed(shape, task, step, rank, ask["ranks"])], learning_rate=LEARNING_RATE,
                max_grad_norm=OPTIONS.max_grad_norm, spec=spec if "dpo" in task else None,
            )  # fmt: skip
            clock.tick(done.loss)
    return {**clock.result(warmup=WARMUP), "peak_gib": memory.gib}


def packed(shape: Any, task: str, step: int, rank: int, ranks: int) -> MicroBatch:
    """This process's records in one row; answers alone are trained."""
    row = []
    for number, record in [*enumerate(records(shape, task, step))][rank::ranks]:
        for which, answer in enumerate(record.answers):
            tokens = np.concatenate([record.prompt, answer])
            trained = np.arange(len(tokens) - 1) >= len(record.prompt) - 1
            place = {"answer": which, "pair": step * RECORDS + number} if "dpo" in task else {}
            row.append(Piece(tokens, tokens[1:], trained, **place))
    return assemble([row], row_length=sum(len(each.tokens) for each in row), pad_id=0)


def trl(ask: dict[str, Any]) -> dict[str, Any]:
    """TRL's SFTTrainer or DPOTrainer, with PEFT's LoRA."""
    from datasets import Dataset, load_from_disk
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    shape, clock, task, steps = SHAPES[ask["shape"]], Clock(), ask["task"], WARMUP + ask["steps"]
    torch.set_num_threads(threads_per_worker(ask["ranks"]))
    is_dpo = "dpo" in task
    trainer_class, config = (DPOTrainer, DPOConfig) if is_dpo else (SFTTrainer, SFTConfig)
    kind: Any = type("InOrder", (trainer_class,), {"_get_train_sampler": _in_order})
    own: dict[str, Any] = {"beta": BETA, "precompute_ref_log_probs": True} if is_dpo else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<e>": 0}, unk_token="<e>")), eos_token="<e>", pad_token="<e>"
    )
    rows = [row for step in range(steps) for row in _rows(shape, task, step)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=RECORDS // ask["ranks"],
            max_steps=steps, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", optim="adamw_torch_fused",
            adam_beta1=OPTIONS.betas[0], adam_beta2=OPTIONS.betas[1], adam_epsilon=OPTIONS.eps,
            weight_decay=OPTIONS.weight_decay, max_grad_norm=OPTIONS.max_grad_norm, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, dataloader_num_workers=0, gradient_checkpointing=False,
            max_length=None, remove_unused_columns=False, seed=SEED, **own,
        )  # fmt: skip
        memory = PeakMemory(CPU)
        adapter = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules="all-linear", task_type="CAUSAL_LM")
        made = kind(
            model=plain_model(shape.hf_config()), args=arguments,
            callbacks=[clock.callback()], processing_class=tokenizer,
            train_dataset=load_from_disk(ask["unused"]) if is_dpo else Dataset.from_list(rows),
            peft_config=adapter if "lora" in task else None,
        )  # fmt: skip
        if is_dpo:
            made.train_dataset = Dataset.from_list(rows)
        made.train()
    return {**clock.result(warmup=WARMUP), "peak_gib": memory.gib}


def _in_order(self: Any, *_: Any) -> Any:
    return torch.utils.data.SequentialSampler(self.train_dataset)


def _rows(shape: Any, task: str, step: int) -> Iterator[dict[str, Any]]:
    """The records as TRL has them once it has tokenised them."""
    for number, record in enumerate(records(shape, task, step)):
        prompt, *answers = (each.tolist() for each in (record.prompt, *record.answers))
        if "dpo" in task:
            chosen, rejected = before(step)[number]
            yield {
                "prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1],
                "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
            }  # fmt: skip
        else:
            yield {"input_ids": prompt + answers[0], "labels": [-100] * len(prompt) + answers[0]}


# ---- all of them -----------------------------------------------------------------------------------------------------


def measure(tasks: list[str], shape: str, folder: Path, *, repeats: int, steps: int) -> Iterator[dict[str, Any]]:
    """After each repeat, what is known of all so far."""
    from datasets import Dataset

    # Of texts, which the DPOTrainer wants to tokenise and to ask its reference about before it is given the records.
    Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * RECORDS).save_to_disk(folder / "unused")
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for task in tasks:
            for ranks in (1, 2):
                for name in TRAINERS if repeat % 2 == 0 else TRAINERS[::-1]:
                    ask = {"kind": name, "task": task, "shape": shape, "ranks": ranks, "steps": steps}
                    ask["unused"] = str(folder / "unused")
                    of_ranks = run_ranks(Path(__file__), ask, ranks=ranks)
                    sample = {
                        "step_seconds": max(each["step_seconds"] for each in of_ranks),
                        "peak_gib_sum": sum(each["peak_gib"] or 0.0 for each in of_ranks),
                        "first_loss": of_ranks[0]["losses"][0],
                    }
                    runs.setdefault((task, ranks, name), []).append(sample)
                    print(f"{repeat + 1}/{repeats} {task} on {ranks}, {name}: {sample}", flush=True)
        yield {
            "machine": machine() | {name: _version(name) for name in ("trl", "peft")}, "shape": shape,
            "steps": steps, "repeats": repeat + 1, "rows": [row_of(runs, task, ranks, shape, steps)
                                                            for task in tasks for ranks in (1, 2)],
        }  # fmt: skip


def row_of(runs: Any, task: str, ranks: int, shape: str, steps: int) -> dict[str, Any]:
    """Medians, and ratios repeat by repeat: ours / theirs."""
    ours, theirs = (runs[task, ranks, name] for name in TRAINERS)
    timed = range(WARMUP, WARMUP + steps)
    tokens = median(sum(each.tokens for each in records(SHAPES[shape], task, step)) for step in timed)
    speed = [their["step_seconds"] / our["step_seconds"] for our, their in zip(ours, theirs, strict=True)]
    memory = [our["peak_gib_sum"] / their["peak_gib_sum"] for our, their in zip(ours, theirs, strict=True)]
    return {
        "task": task, "ranks": ranks, "speed": median(speed), "speed_range": [min(speed), max(speed)],
        "memory": median(memory),
        "tokens_per_second": {name: tokens / median(each["step_seconds"] for each in runs[task, ranks, name])
                              for name in TRAINERS},
        "peak_gib": {name: median(each["peak_gib_sum"] for each in runs[task, ranks, name]) for name in TRAINERS},
        "loss_difference": abs(ours[0]["first_loss"] / theirs[0]["first_loss"] - 1),
    }  # fmt: skip


def measure_chats(
    folder: Path, *, processes: Sequence[int], repeats: int, layers: int | None, steps: int
) -> dict[str, Any]:
    """The chats, by turns: speed and memory as of the other tasks, and the loss of chats held out. fivefold is there in
    each layout of so many processes."""
    chats.prepared(folder, layers=layers, steps=steps)
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for ranks in processes:
            contenders = (*chats.LAYOUTS[ranks], "trl")
            for name in contenders if repeat % 2 == 0 else contenders[::-1]:
                ask = {"kind": "chats-trl" if name == "trl" else "chats-fivefold", "layout": name}
                ask |= {"folder": str(folder), "ranks": ranks}
                # `fivefold train` starts its workers itself.
                of_ranks = run_ranks(Path(__file__), ask, ranks=ranks if name == "trl" else 1)
                adapter = Path(of_ranks[0]["adapter"])
                sample = {
                    "step_seconds": max(median(each["steps"]) for each in of_ranks),
                    "whole_seconds": max(each["whole_seconds"] for each in of_ranks),
                    "peak_gib": max(each["peak_gib"] for each in of_ranks), "first_loss": of_ranks[0]["first_loss"],
                    "held_out_loss": chats.held_out_loss(folder, adapter),
                }  # fmt: skip
                runs.setdefault((ranks, name), []).append(sample)
                print(f"{repeat + 1}/{repeats} chats on {ranks}, {name}: {sample}", flush=True)
        chats.forget(folder)
    return {
        "machine": machine() | {name: _version(name) for name in ("trl", "peft")}, "chats": chats.CHATS,
        "steps": steps, "repeats": repeats, "untrained_loss": chats.held_out_loss(folder, None),
        "rows": [
            row_of_chats(ranks, runs[ranks, layout], runs[ranks, "trl"]) | {"layout": layout}
            for ranks in processes
            for layout in chats.LAYOUTS[ranks]
        ],
    }  # fmt: skip


def row_of_chats(ranks: int, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and ratios repeat by repeat: ours / theirs."""
    pairs = list(zip(ours, theirs, strict=True))
    speed = [their["step_seconds"] / our["step_seconds"] for our, their in pairs]
    return {
        "ranks": ranks, "speed": median(speed), "speed_range": [min(speed), max(speed)],
        "whole": median(their["whole_seconds"] / our["whole_seconds"] for our, their in pairs),
        "memory": median(our["peak_gib"] / their["peak_gib"] for our, their in pairs),
        "step_seconds": {name: median(each["step_seconds"] for each in some)
                         for name, some in zip(TRAINERS, (ours, theirs), strict=True)},
        "held_out_loss": {name: some[0]["held_out_loss"] for name, some in zip(TRAINERS, (ours, theirs), strict=True)},
    }  # fmt: skip


def chats_markdown(result: dict[str, Any]) -> str:
    """The table of the chats."""
    lines = [
        "| processes | layout | fivefold, s/step | TRL, s/step | speed, ours / theirs | (range) | whole run | memory, "
        "ours / theirs | held-out loss, fivefold | TRL |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        seconds, loss, (low, high) = row["step_seconds"], row["held_out_loss"], row["speed_range"]
        lines.append(
            f"| {row['ranks']} | `{row['layout']}` | {seconds['fivefold']:.2f} | {seconds['trl']:.2f} | "
            f"**{row['speed']:.2f}** | {low:.2f} to {high:.2f} | {row['whole']:.2f} | **{row['memory']:.2f}** | "
            f"{loss['fivefold']:.4f} | {loss['trl']:.4f} |"
        )
    machine = result["machine"]
    about = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "trl", "peft"))
    return (
        "\n".join(lines)
        + f"\n\nUntrained, the held-out loss is {result['untrained_loss']:.4f}. {result['steps']} steps, "
        f"{result['repeats']} repeats. {machine['cpu']}, {machine['cores']} cores; {about}; commit {machine['commit']}."
    )


def markdown(result: dict[str, Any]) -> str:
    """The table, and what its reader must know."""
    lines = [
        "| task | processes | fivefold, tokens/s | TRL, tokens/s | speed, ours / theirs | (range) | fivefold, GiB | "
        "TRL, GiB | memory, ours / theirs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        speed, peak, (low, high) = row["tokens_per_second"], row["peak_gib"], row["speed_range"]
        lines.append(
            f"| {row['task']} | {row['ranks']} | {speed['fivefold']:,.0f} | {speed['trl']:,.0f} | "
            f"**{row['speed']:.2f}** | {low:.2f} to {high:.2f} | {peak['fivefold']:.2f} | {peak['trl']:.2f} | "
            f"**{row['memory']:.2f}** |"
        )
    m, worst = result["machine"], max(row["loss_difference"] for row in result["rows"])
    return "\n".join(lines) + (
        f"\n\nA Llama of {result['shape']}, fp32, {RECORDS} records a step, {result['steps']} timed steps, "
        f"{result['repeats']} repeats. Losses of the first step differ by {worst:.1e} at most. Peak memory is that of "
        f"all processes, over what was there before the model. {m['cpu']}, {m['cores']} cores; torch {m['torch']}, "
        f"transformers {m['transformers']}, trl {m['trl']}, peft {m['peft']}; commit {m['commit']}, {m['date']}."
    )


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy model and one repeat, on the screen alone")
    parser.add_argument("--only", default="", help="tasks whose name has this, on the screen alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--chats", action="store_true", help="SmolLM2-135M on 90 chats, instead of the other tasks")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of the chats")
    args = parser.parse_args()
    if args.chats:
        with tempfile.TemporaryDirectory() as folder:
            few = {"repeats": 1, "layers": 2, "steps": 3}
            whole = {"repeats": args.repeats, "layers": None, "steps": chats.STEPS}
            result = measure_chats(Path(folder), processes=args.processes, **(few if args.quick else whole))
        if not args.quick:
            before = json.loads(CHATS.read_text())["rows"] if CHATS.exists() else []
            kept = [row for row in before if row["ranks"] not in args.processes]
            result["rows"] = sorted([*kept, *result["rows"]], key=lambda row: row["ranks"])
            CHATS.write_text(json.dumps(result, indent=1) + "\n")
            put_between(BEGIN_CHATS, END_CHATS, chats_markdown(result), DOCS)
        print(chats_markdown(result))
        return 0
    tasks = [task for task in TASKS if args.only in task]
    shape, repeats, steps = ("tiny", 1, 1) if args.quick else ("15M", args.repeats, args.steps)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for result in measure(tasks, shape, Path(folder), repeats=repeats, steps=steps):
            if not (args.quick or args.only):
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
                put_between(BEGIN, END, markdown(result), DOCS)
    print(markdown(result))
    return 0


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "fivefold": fivefold, "trl": trl, "chats-fivefold": chats.fivefold, "chats-trl": chats.trl,
}  # fmt: skip

if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        request = json.loads(sys.argv[1])
        Path(sys.argv[2]).write_text(json.dumps(KINDS[request["kind"]](request)))
    else:
        sys.exit(main())
