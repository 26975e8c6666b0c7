"""`ff.parallelize` as users call it: on a model they built themselves, in whatever world there is."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fivefold as ff
from fivefold.parallel import passes
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.loss.tasks import CrossEntropy
from fivefold.parallel.passes import Inputs
from fivefold.parallel.state import state_of
from tests.parity import Case, hf_config
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

IDS = torch.arange(32).view(2, 16) % 101


def own_model(tied: bool) -> Any:
    """A model with its weights, built as the documentation of `transformers` says."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(hf_config(Case("single", tied=tied, kv_heads=1)))
    return model.to(torch.float64).eval()


def logits_on_rank(layout: str, tied: bool) -> tuple[Any, bool]:
    model = ff.parallelize(own_model(tied), ff.Layout.parse(layout))
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    names = {name for unit in state_of(model).plan.feature(FsdpPlan).units for name in unit.parameters}
    return logits.numpy(), names == set(state_of(model).placement.shards)


def loss_on_rank(layout: str, cu_seqlens: list[int]) -> float:
    """Summed loss of packed rows: the documents end where `cu_seqlens` say."""
    model = ff.parallelize(own_model(True), ff.Layout.parse(layout))
    positions = torch.arange(16).expand(2, -1)
    labels = IDS.roll(-1, 1)
    with torch.no_grad():
        loss = passes.loss(
            model, Inputs(IDS, positions, CrossEntropy(labels), cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))
        )
    return float(loss)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ("tp2+fp64", True), put_off("shard2+fp64", False), put_off("tp2+nosp+fp64", False), ("shard-1+fp64", True),
        *(put_off(f"{layout}+fp64", tied) for layout, tied in (("tp2", False), ("shard2", True), ("tp2+nosp", True))),
    ],
)  # fmt: skip
def test_a_users_own_model_gives_its_own_logits(layout: str, tied: bool) -> None:
    with torch.no_grad():
        expected = own_model(tied)(input_ids=IDS).logits
    for logits, each_parameter_once in run_ranks(2, logits_on_rank, layout, tied):
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-9, atol=1e-9)
        assert each_parameter_once


def test_documents_stay_apart_in_a_users_own_model() -> None:
    """The model came with another attention; ours is selected, so that bounds count."""
    packed = [run_ranks(2, loss_on_rank, layout, [0, 5, 16, 32])[0] for layout in ("tp2+fp64", "shard2+fp64")]
    whole = run_ranks(2, loss_on_rank, "tp2+fp64", [0, 16, 32])[0]
    assert packed[0] == pytest.approx(packed[1], rel=1e-10)
    assert abs(packed[0] - whole) > 1e-3


def test_rows_that_tp_does_not_divide_are_refused() -> None:
    assert all(run_ranks(2, refusal_on_rank))


def refusal_on_rank() -> bool:
    model = ff.parallelize(own_model(False), ff.Layout.parse("tp2+fp64"))
    with pytest.raises(ff.UserError, match="tp 2 does not divide 15"):
        model(input_ids=IDS[:, :15])
    return True


def test_one_process_without_a_group_and_with_transformers_first() -> None:
    """The design's own example, in a fresh interpreter, whatever is imported before."""
    script = """
from transformers import LlamaConfig, LlamaForCausalLM
import torch
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=101)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
import fivefold as ff
model = ff.parallelize(model, ff.Layout(dp_shard=-1, precision="fp32"))
print(model(input_ids=torch.arange(8).view(1, 8)).logits.shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "torch.Size([1, 8, 101])" in done.stdout, done.stderr
