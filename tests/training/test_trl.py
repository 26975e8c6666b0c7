"""DPO, IPO and KTO beside TRL's own trainers on the same batch, in fp32: loss, metrics, gradients. Skipped without
`trl`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.config import ObjectiveSection
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.objectives import metrics_of
from fivefold.training.preference import ObjectiveSpec, mean_over_pairs
from tests.parity import Case, build, gradient, pieces, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.test_objectives import DESIRABLE, all_pairs, before, micro_batches, near

pytestmark = pytest.mark.full

trl = pytest.importorskip("trl")

CASE = Case("single+mb2+fp32", loss_chunks=3)


def on_rank(objective: ObjectiveSection) -> tuple[float, dict[str, float], list[Any]]:
    model = build(CASE)
    batch = micro_batches(CASE, state_of(model).placement.data_rank, rated=objective.is_rated)
    spec = ObjectiveSpec(objective, near() if objective.is_rated else before())
    loss = float(training_step.accumulate(model, batch, spec=spec))
    metrics = dict(mean_over_pairs(model, batch, spec)[1])
    return loss, metrics, pieces(model, {name: gradient(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize(("name", "theirs"), [("dpo", "sigmoid"), put_off("ipo", "ipo")])
def test_the_loss_of_trl(tmp_path: Path, name: str, theirs: str) -> None:
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
    records = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    trainer = trainer_of(tmp_path, trl.DPOTrainer, trl.DPOConfig, records, beta=0.3, loss_type=theirs)
    compare(trainer, DataCollatorForPreference(pad_token_id=0)(examples), ObjectiveSection(name=name, beta=0.3))


def test_kto_of_trl(tmp_path: Path) -> None:
    """Of one batch: TRL takes the baseline of a micro batch, and here it is that of the global one."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    other = near()
    examples = [
        {
            "prompt_ids": own[:prompt].tolist(), "completion_ids": own[prompt:].tolist(),
            "KL_completion_ids": others[prompt:].tolist(), "label": DESIRABLE[at], "ref_logps": other[at, 0],
            "ref_KL_logps": other[at, 1],
        }
        for at, (prompt, own, others) in enumerate(all_pairs())
    ]  # fmt: skip
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    records = [{"prompt": "a", "completion": "b", "label": each} for each in (True, False)]
    trainer = trainer_of(tmp_path, trl.KTOTrainer, trl.KTOConfig, records, beta=0.4, **weights)
    inputs = DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    compare(trainer, inputs, ObjectiveSection(name="kto", beta=0.4, **weights))


def trainer_of(folder: Path, kind: Any, config: Any, records: list[dict[str, Any]], **options: Any) -> Any:
    """TRL's trainer of the model of `CASE`, whose reference is computed before."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<e>": 0}, unk_token="<e>")), eos_token="<e>", pad_token="<e>"
    )
    trainer = kind(
        model=reference_model(CASE, torch.float32), ref_model=reference_model(CASE, torch.float32),
        args=config(
            output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
            disable_dropout=True, per_device_train_batch_size=len(all_pairs()), **options,
        ),
        train_dataset=Dataset.from_list(records), processing_class=tokenizer,
    )  # fmt: skip
    trainer.precompute_ref_logps = True
    return trainer


def compare(trainer: Any, inputs: Any, objective: ObjectiveSection) -> None:
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs, False)
    loss.backward()
    ((found, metrics, gradients),) = run_ranks(1, on_rank, objective)
    assert found == pytest.approx(float(loss), rel=1e-5)
    right = {name: gradient(p).numpy() for name, p in trainer.model.named_parameters()}
    floor = 1e-5 * float(np.sqrt(sum((each**2).sum() for each in right.values())))
    for parameter, _, values in gradients:
        assert np.linalg.norm(values - right[parameter]) <= max(1e-5 * np.linalg.norm(right[parameter]), floor), (
            parameter
        )
    logged = {name: trainer._metrics["train"][name][-1] for name in metrics_of(objective)}
    assert metrics == pytest.approx(logged, rel=1e-5)
