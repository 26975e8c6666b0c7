"""A run goes on when everything that decides what is learnt agrees; else the key is named."""

from typing import Any

import pytest

from fivefold.checkpoint import agreement, check_agreement
from fivefold.config import RunConfig
from fivefold.core.errors import UserError


def _agreement(fingerprint: str = "f", **sections: Any) -> dict[str, Any]:
    return agreement(RunConfig.model_validate(sections), fingerprint)


MUST = {
    "model.name_or_path": {"model": {"name_or_path": "other"}},
    "model.init": {"model": {"init": "pretrained"}},
    "model.overrides": {"model": {"overrides": {"hidden_size": 8}}},
    "tokenizer.name_or_path": {"tokenizer": {"name_or_path": "byte"}},
    "data.seq_length": {"data": {"seq_length": 16}},
    "data.packing": {"data": {"packing": False}},
    "train.seed": {"train": {"seed": 1}},
    "train.global_batch_size": {"train": {"global_batch_size": 8}},
    "optimizer.learning_rate": {"optimizer": {"learning_rate": 0.5}},
    "optimizer.betas": {"optimizer": {"betas": [0.9, 0.99]}},
    "optimizer.name": {"optimizer": {"name": "muon"}},
    "scheduler.name": {"scheduler": {"name": "linear"}},
    "scheduler.warmup_steps": {"scheduler": {"warmup_steps": 7}},
}
MAY = [
    {"layout": {"tp": 2, "dp_shard": 1}},
    {"train": {"micro_batch_size": 2, "max_steps": 5000, "compile": False, "device": "cpu"}},
    {"log": {"every": 7}, "eval": {"every": 3}, "sample": {"prompts": ["a"]}, "checkpoint": {"every": 9}},
    {"precision": {"compute": "fp32"}, "memory": {"recompute": "full", "loss_chunks": 3}, "run": {"name": "other"}},
]


@pytest.mark.parametrize("key", MUST)
def test_a_key_that_must_agree_is_named_with_both_values(key: str) -> None:
    with pytest.raises(UserError) as error:
        check_agreement(_agreement(), _agreement(**MUST[key]))
    assert error.value.what.startswith(f"{key} is ") and "was trained with" in error.value.what
    assert error.value.exit_code == 2


USED: list[tuple[str, dict[str, Any], str, float]] = [  # a section as it is used, and a key of it with another value
    ("adapter", {"name": "lora"}, "alpha", 7.0),
    ("balance", {}, "bias_rate", 0.01),
    ("objective", {"name": "dpo"}, "beta", 0.5),
    ("outer", {"every": 3}, "learning_rate", 0.5),
    ("layout", {"dp_shard": 1, "dp_replicate": 2}, "dp_replicate", 4),
]


@pytest.mark.parametrize(("section", "values", "key", "other"), USED)
def test_keys_that_matter_where_they_are_used_must_agree(
    section: str, values: dict[str, Any], key: str, other: float
) -> None:
    beside = {"outer": {"every": 3}} if section == "layout" else {}  # replicas that train apart
    before, now = ({**beside, section: changed} for changed in (values, {**values, key: other}))
    with pytest.raises(UserError, match=rf"^{section}\.{key} is {other}, but"):
        check_agreement(_agreement(**before), _agreement(**now))


@pytest.mark.parametrize("sections", MAY)
def test_how_it_is_computed_may_differ(sections: dict[str, Any]) -> None:
    check_agreement(_agreement(), _agreement(**sections))


def test_data_are_known_by_their_contents() -> None:
    moved = {"data": {"train": "elsewhere.txt"}}
    check_agreement(_agreement(), _agreement(**moved))
    with pytest.raises(UserError, match=r"data\.train\[0\]\.path is elsewhere\.txt, but .* with "):
        check_agreement(_agreement(), _agreement("g", **moved))
    with pytest.raises(UserError, match=r"data\.train: the text is not the one"):
        check_agreement(_agreement(), _agreement("g"))


def test_keys_of_another_optimizer_need_not_agree() -> None:
    """A checkpoint of AdamW may be older than Muon."""
    assert not {"optimizer.momentum", "optimizer.ns_steps"} & _agreement().keys()
    muon = {"name": "muon", "momentum": 0.9}
    with pytest.raises(UserError, match=r"optimizer\.momentum is 0\.95, but the checkpoint was trained with 0\.9"):
        check_agreement(_agreement(optimizer=muon), _agreement(optimizer={"name": "muon"}))


def test_a_key_that_the_checkpoint_does_not_know() -> None:
    with pytest.raises(UserError, match=r"x is 1, but the checkpoint was trained with \(not set\)"):
        check_agreement(_agreement(), {**_agreement(), "x": 1})


def test_a_key_that_only_the_checkpoint_knows() -> None:
    """Keys that are left at their defaults are not written: a coefficient that was taken out of the run file."""
    balanced = _agreement(balance={"aux_loss": 0.25})
    with pytest.raises(UserError, match=r"balance\.aux_loss is \(not set\), but the checkpoint was trained with 0\.25"):
        check_agreement(balanced, _agreement())


def test_a_model_that_changed_behind_its_name_is_told() -> None:
    saved, now = (
        agreement(RunConfig.model_validate({}), "f", {"rope_theta": theta, "transformers_version": version})
        for theta, version in ((10000.0, "5.17"), (500000.0, "5.23"))
    )
    with pytest.raises(UserError, match=r"model.config.rope_theta is 500000.0, but"):
        check_agreement(saved, now)
