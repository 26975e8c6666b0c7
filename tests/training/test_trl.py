"""DPO and IPO beside TRL's own trainer on the same batch, in fp32: loss, metrics, gradients. Skipped without `trl`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.objectives import METRICS, Objective
from fivefold.training.preference import Goal, mean_over_pairs
from tests.parity import Case, build, gradient, pieces, reference_model
from tests.pool import run_ranks
from tests.training.test_objectives import all_pairs, before, micro_batches

trl = pytest.importorskip("trl")

CASE = Case("single+mb2+fp32", loss_chunks=3)


def on_rank(objective: Objective) -> tuple[float, dict[str, float], list[Any]]:
    model = build(CASE)
    batch = micro_batches(CASE, state_of(model).plan.data_rank)
    goal = Goal(objective, before())
    loss = float(training_step.accumulate(model, batch, goal=goal))
    metrics = dict(mean_over_pairs(model, batch, goal)[1])
    return loss, metrics, pieces(model, {name: gradient(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize(("name", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_the_loss_of_trl(tmp_path: Path, name: str, theirs: str) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    other = before()
    examples = [
        {
            "prompt_ids": chosen[:prompt].tolist(), "chosen_ids": chosen[prompt:].tolist(),
            "rejected_ids": rejected[prompt:].tolist(), "ref_chosen_logps": other[at, 0],
            "ref_rejected_logps": other[at, 1],
        }
        for at, (prompt, chosen, rejected) in enumerate(all_pairs())
    ]  # fmt: skip
    model = reference_model(CASE, torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<e>": 0}, unk_token="<e>")), eos_token="<e>", pad_token="<e>"
    )
    trainer = trl.DPOTrainer(
        model=model, ref_model=reference_model(CASE, torch.float32),
        args=trl.DPOConfig(
            output_dir=str(tmp_path), beta=0.3, loss_type=theirs, use_cpu=True, bf16=False, report_to="none",
            gradient_checkpointing=False, disable_dropout=True, per_device_train_batch_size=len(examples),
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.precompute_ref_logps = True
    inputs = DataCollatorForPreference(pad_token_id=0)(examples)
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs, False)
    loss.backward()
    ((found, metrics, gradients),) = run_ranks(1, on_rank, Objective(name, beta=0.3))
    assert found == pytest.approx(float(loss), rel=1e-5)
    right = {name: gradient(p).numpy() for name, p in trainer.model.named_parameters()}
    floor = 1e-5 * float(np.sqrt(sum((each**2).sum() for each in right.values())))
    for parameter, _, values in gradients:
        assert np.linalg.norm(values - right[parameter]) <= max(1e-5 * np.linalg.norm(right[parameter]), floor), (
            parameter
        )
    logged = {name: trainer._metrics["train"][name][-1] for name in METRICS}
    assert metrics == pytest.approx(logged, rel=1e-5)
