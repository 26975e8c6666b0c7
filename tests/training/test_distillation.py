"""Distillation: what a teacher says under a layout, the loss and its gradients, against the unmodified models in one
process; and runs of it.

The reference is written here: both models' whole logits, the teacher's likeliest tokens of them, the divergence over
the whole vocabulary, and autograd through all of it, in fp64. Rows have documents of unequal lengths and targets that
are not trained.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data.batch import MicroBatch, TeacherTargets, assemble
from fivefold.parallel import passes
from fivefold.parallel.loss.tasks import TopLogProbs
from fivefold.parallel.state import state_of
from fivefold.training import reference
from fivefold.training import step as training_step
from fivefold.training.inputs import evaluating, to_device
from fivefold.verification.by_hand import exactly
from tests.parity import ROW, VOCABULARY, Case, build, documents, gathered, gradient, piece, pieces, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import Stopped, column, run_dir, run_file, same, state, train, train_alone

# The others have a fold of one of these alone.
LAYOUTS = [
    "tp2+nosp",
    "pp2.cp2",
    *map(put_off, ("shard2.ep2", "shard2.tp2", "single", "shard2", "tp2", "pp2", "cp2")),
]
# top_k, temperature, alpha
FOLLOWED = {"warm": (7, 2.5, 0.3), "plain": (5, 1.0, 0.6), "alone": (3, 1.7, 1.0), "all": (VOCABULARY, 1.0, 1.0)}
TEACHER = Case("single+fp64", "qwen2")  # another family, with biases


def case_of(layout: str) -> Case:
    return Case(f"{layout}+mb2+fp64", "qwen3_moe" if "ep" in layout else "llama", loss_chunks=3)


def is_trained(length: int) -> np.ndarray:
    """Of the targets of a document: not the first third, but the last."""
    place = np.arange(length - 1)
    return (place >= length // 3) | (place == length - 2)


def micro_batches(case: Case, data_rank: int) -> list[MicroBatch]:
    layout = case.parsed
    length, size = -(-ROW // layout.row_multiple) * layout.row_multiple, layout.micro_batch_size
    rows = [
        [replace(piece(each), trained=is_trained(len(each))) if len(each) % 2 else piece(each) for each in row]
        for row in documents(case, 0)
    ]
    firsts = [(each * layout.data_ranks + data_rank) * size for each in range(layout.accumulation(len(rows)))]
    return [assemble(rows[first : first + size], row_length=length, pad_id=0) for first in firsts]


# ---- plain -----------------------------------------------------------------------------------------------------------


def plain_loss(student: nn.Module, teacher: nn.Module, top_k: int, temperature: float, alpha: float) -> Tensor:
    """The mean over trained targets."""
    losses = []
    for row in documents(TEACHER, 0):
        for document in row:
            ids = torch.from_numpy(document)[None]
            trained = torch.from_numpy(
                is_trained(len(document)) if len(document) % 2 else np.full(len(document) - 1, 1)
            )
            own, theirs = student(input_ids=ids).logits[0, :-1], teacher(input_ids=ids).logits[0, :-1].detach()
            top = theirs.topk(top_k)
            whole = torch.zeros_like(theirs).scatter(-1, top.indices, (top.values / temperature).softmax(-1))
            follow = F.kl_div((own / temperature).log_softmax(-1), whole, reduction="none").sum(-1) * temperature**2
            text = F.cross_entropy(own, ids[0, 1:], reduction="none")
            losses.append((alpha * follow + (1 - alpha) * text)[trained.bool()])
    return torch.cat(losses).mean()


# ---- under a layout --------------------------------------------------------------------------------------------------


def asked(teacher: Any, batch: MicroBatch, top_k: int, vocabulary: int = VOCABULARY) -> tuple[np.ndarray, np.ndarray]:
    inputs = to_device(batch, torch.device("cpu"), task=TopLogProbs(top_k, vocabulary))
    with evaluating(teacher):
        tokens, log_probs = passes.top_log_probs(teacher, inputs)
    return tokens.numpy(), log_probs.numpy()


def on_rank(layout: str, top_k: int, temperature: float, alpha: float) -> dict[str, Any]:
    case, of_teacher = case_of(layout), replace(TEACHER, layout=f"{layout}+mb2+fp64", loss_chunks=2)
    teacher = build(replace(of_teacher, layout=of_teacher.layout.replace(".ep2", "")))
    model = build(case)
    with exactly("fp64"):
        batch = micro_batches(case, state_of(teacher).placement.data_rank)
        said = [asked(teacher, each, top_k) for each in batch]
        followed = [
            replace(each, teacher=TeacherTargets(tokens.astype(np.int32), log_probs, temperature, alpha))
            for each, (tokens, log_probs) in zip(batch, said, strict=True)
        ]
        loss = float(training_step.accumulate(model, followed))
        gradients = pieces(model, {name: gradient(p) for name, p in model.named_parameters()})
    return {"loss": loss, "gradients": gradients, "said": said, "data_rank": state_of(model).placement.data_rank}


def both(family: str) -> tuple[nn.Module, nn.Module]:
    case = replace(TEACHER, family=family)
    return tuple(reference_model(each, torch.float32).double() for each in (case, TEACHER))  # type: ignore[return-value]


def check(layout: str, which: str) -> None:
    case, options = case_of(layout), FOLLOWED[which]
    student, teacher = both(case.family)
    with exactly("fp64"):
        loss = plain_loss(student, teacher, *options)
        loss.backward()  # type: ignore[no-untyped-call]
    per_rank: Sequence[dict[str, Any]] = run_ranks(case.parsed.world, on_rank, layout, *options)
    for found in per_rank:
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-10)
    grads = {name: gradient(p).numpy() for name, p in student.named_parameters()}
    whole = gathered([found["gradients"] for found in per_rank], {name: g.shape for name, g in grads.items()})
    floor = 1e-6 * np.sqrt(sum((g**2).sum() for g in grads.values()))
    for name, right in grads.items():
        assert np.linalg.norm(whole[name] - right) <= 1e-10 * max(np.linalg.norm(right), floor), name


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_is_followed_as_plain_transformers_do(layout: str) -> None:
    check(layout, "warm")


@pytest.mark.full
@pytest.mark.parametrize(("layout", "which"), [("shard2.ep2", "plain"), put_off("pp2.cp2", "alone"), ("tp2", "all")])
def test_other_temperatures_and_weights(layout: str, which: str) -> None:
    check(layout, which)


VOCABULARIES = (VOCABULARY, 97, 55)


def likeliest(layout: str) -> list[tuple[int, np.ndarray, np.ndarray, MicroBatch]]:
    """What a teacher says of each micro batch, for each size of the vocabulary that is shared."""
    teacher = build(replace(TEACHER, layout=f"{layout}+mb2+fp64", loss_chunks=2))
    with exactly("fp64"):
        batch = micro_batches(case_of(layout), state_of(teacher).placement.data_rank)
        return [(size, *asked(teacher, each, 6, size), each) for size in VOCABULARIES for each in batch]


@pytest.mark.full
@pytest.mark.parametrize("layout", [*map(put_off, ("single", "cp2")), "tp2", "pp2"])
def test_the_likeliest_of_the_shared_tokens(layout: str, subtests: pytest.Subtests) -> None:
    """Rows of a vocabulary beyond the tokenizer's are never named; log-probabilities are of the whole softmax."""
    (_, teacher), per_rank = both("llama"), run_ranks(case_of(layout).parsed.world, likeliest, layout)
    for vocabulary in VOCABULARIES:
        with subtests.test(vocabulary=vocabulary):
            seen = 0
            for tokens, log_probs, batch in (told for found in per_rank for size, *told in found if size == vocabulary):
                for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
                    ids = torch.from_numpy(batch.input_ids.reshape(-1)[start:stop])[None]
                    with torch.no_grad(), exactly("fp64"):
                        logs = teacher(input_ids=ids).logits[0].log_softmax(-1)
                    right = logs[:, :vocabulary].topk(6)
                    np.testing.assert_array_equal(tokens.reshape(-1, 6)[start:stop], right.indices)
                    np.testing.assert_allclose(log_probs.reshape(-1, 6)[start:stop], right.values, rtol=1e-10)
                    seen += 1
            assert seen > 10


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size that was trained on the text of the runs."""
    folder = tmp_path_factory.mktemp("teacher")
    tree = run_file(folder, run__name="teacher", train__max_steps=12, checkpoint__export_hf=True)
    tree["model"]["overrides"] = {"hidden_size": 24, "num_hidden_layers": 3}
    assert train_alone(tree).error is None
    return run_dir(tree) / "hf"


def tree_of(folder: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    objective = {"name": "distill", "teacher": str(teacher), "top_k": 20, "temperature": 2.0, "alpha": 0.7}
    given = changes.pop("objective", {})
    return run_file(folder, **changes) | {"objective": objective | given}


@pytest.mark.full
def test_a_run_follows_its_teacher(tmp_path: Path, teacher: Path) -> None:
    """Better after a few steps than on the text alone; the loss is lower than the entropy of what it cannot know."""
    options: dict[str, Any] = {"train__max_steps": 12, "data__validation": 0.1, "eval__every": 12}
    followed, text = (
        tree_of(tmp_path, teacher, run__name=name, objective=objective, **options)
        for name, objective in (("followed", {"alpha": 1.0}), ("text", {"alpha": 0.0}))
    )
    ran = train_alone(followed)
    assert ran.error is None and "asking the teacher" in ran.screen
    assert "the 20 likeliest tokens of 3," in ran.screen and "asked now" in ran.screen
    assert train_alone(text).error is None
    losses = column(followed, "train/loss")
    assert losses[-1] < 0.8 * losses[0] and all(loss > 0 for loss in losses)
    assert column(text, "train/loss") != losses
    plain = run_file(tmp_path, run__name="plain", **options)
    assert train_alone(plain).error is None
    assert column(text, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-5)
    for tree in (followed, text, plain):  # what is evaluated is the likelihood of the text
        assert 0 < column(tree, "eval/loss")[-1] < 5


@pytest.mark.full
def test_the_teacher_itself_has_nothing_to_learn(tmp_path: Path, teacher: Path) -> None:
    tree = tree_of(tmp_path, teacher, objective={"alpha": 1.0, "top_k": 257}, train__max_steps=1)
    tree["model"] = {"name_or_path": str(teacher), "init": "pretrained"}
    assert train_alone(tree).error is None
    assert column(tree, "train/loss")[0] == pytest.approx(0, abs=1e-6)
    assert column(tree, "train/grad_norm")[0] == pytest.approx(0, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({"pp": 2}, 2),
        put_off({"dp_shard": 2, "tp": 2}, 4), put_off({"tp": 2}, 2), put_off({"cp": 2}, 2), put_off({}, 1),
    ],
)  # fmt: skip
def test_every_layout_asks_and_follows_alike(tmp_path: Path, teacher: Path, layout: dict[str, int], world: int) -> None:
    trees = [tree_of(tmp_path, teacher, run__name=name, train__max_steps=3) for name in ("alone", "laid")]
    assert train_alone(trees[0]).error is None
    shutil.rmtree(tmp_path / "cache" / "teacher")
    trees[1]["layout"] = layout
    ran = train(trees[1], world)
    assert ran.error is None and "asked now" in ran.screen
    assert column(trees[1], "train/loss") == pytest.approx(column(trees[0], "train/loss"), rel=2e-5)


@pytest.mark.full
def test_resumed_it_is_bitwise_the_run_left_alone_and_asks_nobody(tmp_path: Path, teacher: Path) -> None:
    options: dict[str, Any] = {"train__max_steps": 5, "checkpoint__every": 2}
    alone, stopped = (tree_of(tmp_path, teacher, run__name=name, **options) for name in ("alone", "stopped"))
    assert train_alone(alone).error is None
    ran = train_alone(stopped, stop_at=4)
    assert isinstance(ran.error, Stopped) and "from the cache" in ran.screen
    ran = train_alone(stopped)
    assert ran.error is None and "from the cache" in ran.screen and "step 2 of 5" in ran.screen
    assert column(stopped, "train/loss") == column(alone, "train/loss")
    assert same(state(stopped, 5), state(alone, 5))


@pytest.mark.full
def test_only_the_rows_that_are_read_are_asked_about(tmp_path: Path, teacher: Path) -> None:
    """2 steps of 8 rows of some 66."""
    tree = tree_of(tmp_path, teacher, train__max_steps=2)
    assert train_alone(tree).error is None
    (file,) = (tmp_path / "cache" / "teacher").glob("*/tokens.npy")
    assert np.load(file).shape == (16 * 61, 20) or np.load(file).shape == (16 * 61 - 1, 20)


@pytest.mark.full
def test_what_a_teacher_says_follows_from_what_is_in_its_key(tmp_path: Path, teacher: Path) -> None:
    other = Path(shutil.copytree(teacher, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: each * 1.5 for name, each in weights.items()}, other / "model.safetensors", {"format": "pt"})
    changes: list[tuple[dict[str, Any], bool]] = [
        ({}, True), ({"objective": {"temperature": 3.0, "alpha": 0.2}}, False), ({"objective": {"top_k": 21}}, True),
        ({"objective": {"teacher": str(other)}}, True), ({"precision__compute": "bf16"}, True),
        ({"train__seed": 8}, True),  # other rows, as many
    ]  # fmt: skip
    for number, (change, is_new) in enumerate(changes):
        tree = tree_of(tmp_path, teacher, run__name=f"run{number}", train__max_steps=2, **change)
        ran = train(tree, 1)
        assert ran.error is None and ("asked now" in ran.screen) == is_new, (change, ran.screen)


@pytest.mark.full
def test_what_is_damaged_in_the_cache_is_asked_again(tmp_path: Path, teacher: Path) -> None:
    first, again = (tree_of(tmp_path, teacher, run__name=name, train__max_steps=2) for name in ("first", "again"))
    assert train_alone(first).error is None
    (file,) = (tmp_path / "cache" / "teacher").glob("*/log_probs.npy")
    file.write_bytes(file.read_bytes()[:-4] + b"\x01" * 4)
    ran = train_alone(again)
    assert ran.error is None and "asked now" in ran.screen
    assert column(again, "train/loss") == column(first, "train/loss")


def test_what_a_killed_run_was_told_is_removed_and_that_of_one_still_asking_kept(tmp_path: Path) -> None:
    with reference._asking(tmp_path) as held:
        killed = tmp_path / ".asking.killed"
        killed.mkdir()
        (killed / "tokens.npy").write_bytes(bytes(100))
        with reference._asking(tmp_path) as other:
            assert held.is_dir() and other.is_dir() and not killed.exists()
    assert not list(tmp_path.glob(".asking.*"))


def test_the_disk_has_the_place_of_all_that_a_teacher_will_say(tmp_path: Path) -> None:
    """Or a disk that others fill would end the run by a signal (SIGBUS) when a page of it is written."""
    reference._arrays(tmp_path, tmp_path, (100_000, 8), np.dtype(np.float32))
    for file in tmp_path.iterdir():
        assert 512 * file.stat().st_blocks >= 3_200_000


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"temperature": 0}, "temperature"),
        ({"teacher": ""}, "distill needs objective.teacher"),
        ({"name": "sft"}, "sft uses no teacher"),
        ({"name": "dpo"}, "dpo uses no teacher"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(tree_of(tmp_path, tmp_path, objective=change))


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "said"),
    [({"top_k": 258}, "objective.top_k is 258, and there are 257 tokens"), ({"teacher": "no"}, "no")],
)
def test_what_cannot_be_followed(tmp_path: Path, teacher: Path, change: dict[str, Any], said: str) -> None:
    error = train_alone(tree_of(tmp_path, teacher, objective=change)).error
    assert isinstance(error, UserError) and said in error.what


@pytest.mark.full
def test_a_teacher_of_fewer_positions_is_named(tmp_path: Path, teacher: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    config = json.loads((teacher / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    error = train_alone(tree_of(tmp_path, other)).error
    assert isinstance(error, UserError) and f"objective.teacher {other}" in error.what
    assert "name another teacher" in str(error.fix)


@pytest.mark.full
def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path, teacher: Path) -> None:
    """Two tokens that changed places would be learnt as each other, silently."""
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = train_alone(tree_of(tmp_path, other)).error
    assert isinstance(error, UserError) and "'a'" in error.what and "has it as" in error.what
    config = json.loads((teacher / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 11}))
    error = train_alone(tree_of(tmp_path, other)).error
    assert isinstance(error, UserError) and "a vocabulary of 11" in error.what
