"""Every family of `tests/families.py`: a new entry there is tested here without a change to this file.

The reference is always the unmodified model of `transformers`, built on the CPU.
"""

from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fivefold.checkpoint import export
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.discover import anatomy_of, trace
from fivefold.models.forwards import check_lengths, check_slices
from fivefold.models.partition import derive
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import ModelTensors, RandomInit, SafetensorsFolder, stored_tensors
from fivefold.parallel.apply import parallelize
from fivefold.training.model import build_model
from fivefold.verification.by_hand import exact
from tests.checkpoint.folders import OVERRIDES, VOCABULARY, hf_folder, save_run
from tests.parity import FAMILIES, PAD, Case, hf_config, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off

# Initialisation -------------------------------------------------------------------------------------------------------

WIDER = {
    "hidden_size": 96, "intermediate_size": 211, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "vocab_size": 499, "initializer_range": 0.11, "num_hidden_layers": 2,
}  # fmt: skip
SIGMAS = 5  # of an estimate: one in a million by chance, and the numbers are the same in every run


def wider(family: str, tied: bool) -> Any:
    """The family's config with larger tensors, and a spread that is nobody's default."""
    tiny = FAMILIES[family]
    own = {key: 2 * [tiny[key][0]] for key in ("layer_types", "no_rope_layers") if key in tiny}
    renamed = {"n_embd": 96, "n_layer": 2, "n_inner": 211} if "n_embd" in tiny else {}
    return hf_config(Case("single", family, tied=tied, overrides=tuple({**WIDER, **own, **renamed}.items())))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_distributed_as_the_model_initialises_itself(family: str, tied: bool) -> None:
    config = wider(family, tied)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = RandomInit(build_meta(config), seed=1)
    assert ours.names() == set(stored_tensors(theirs))
    random = 0
    for name, expected in theirs.named_parameters():
        values = ours.whole(name)
        if expected.min() == expected.max():
            assert torch.equal(values, expected), name
            continue
        random += 1
        zero, ours_zero = ((each == 0).reshape(len(each), -1).all(1) for each in (expected, values))
        assert torch.equal(ours_zero, zero), f"{name}: the padding row"
        assert_same_distribution(values[~zero].flatten(), expected.detach()[~zero].flatten(), name)
    assert random >= 2 * 4
    embedding = theirs.get_input_embeddings()
    if embedding.padding_idx is not None:
        assert embedding.padding_idx == PAD and not embedding.weight[PAD].any()


def assert_same_distribution(values: Tensor, expected: Tensor, name: str) -> None:
    """Mean and spread within their errors; and the shape, by Kolmogorov and Smirnov's distance of two samples."""
    n = values.numel()
    spread = expected.std()
    assert abs(values.mean() - expected.mean()) < SIGMAS * spread * (2 / n) ** 0.5, f"{name}: mean"
    assert abs(values.std() / spread - 1) < SIGMAS * (1 / n) ** 0.5, f"{name}: spread"
    both = torch.cat([values, expected]).sort().values
    below = [torch.searchsorted(each.sort().values, both, right=True) / n for each in (values, expected)]
    assert (below[0] - below[1]).abs().max() < 2.6 * (2 / n) ** 0.5, f"{name}: shape"  # 3 in a million by chance


def test_buffers_are_those_of_the_model_built_on_the_cpu(subtests: pytest.Subtests) -> None:
    for family in FAMILIES:
        with subtests.test(msg=family):
            config = hf_config(Case("single", family))
            theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            ours = buffer_values(build_meta(config))
            assert ours.keys() == dict(theirs.named_buffers()).keys()
            for name, buffer in theirs.named_buffers():
                assert ours[name].dtype == buffer.dtype and torch.equal(ours[name], buffer), name


# Rotary scaling -------------------------------------------------------------------------------------------------------

ORIGINAL, LENGTHS = 16, (37, 5, 11, 8)  # rows of 61 tokens, and one document that is longer than the original positions
SHORT, LONG = [1.0, 1.2, 1.5, 2.0], [1.5, 3.0, 6.0, 9.0]
THETA = {"rope_theta": 100.0, "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {**THETA, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_theta": 100.0, "factor": 4.0},
    "yarn": {**THETA, "factor": 4.0},
    "dynamic": {"rope_theta": 100.0, "factor": 4.0},
    "longrope": {**THETA, "short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 1.0},
    "longrope one table": {**THETA, "short_factor": LONG, "long_factor": LONG, "partial_rotary_factor": 1.0},
}
FIXED, FOLLOWING = ("llama3", "linear", "yarn", "longrope one table"), ("dynamic", "longrope")
LAYOUTS = ("single+fp64", "tp2+fp64")


def roped(layout: str, kind: str) -> Case:
    """Llama (Phi-3 for longrope) with this scaling."""
    name = kind.partition(" ")[0]
    rope = {"rope_type": name, **ROPES[kind]}
    positions = ORIGINAL if kind == "dynamic" else 64
    values = {"max_position_embeddings": positions, "rope_parameters": rope}
    if name == "longrope":
        return Case(layout, "phi3", overrides=(*values.items(), ("original_max_position_embeddings", ORIGINAL)))
    return Case(layout, "llama", overrides=tuple(values.items()))


def loud(case: Case, dtype: torch.dtype) -> Any:
    """The unmodified model with scores that are far from flat, so that every rotation shows."""
    model = reference_model(case, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".layers." in name:
                parameter.mul_(4)
    return model


def texts(lengths: tuple[int, ...]) -> list[Tensor]:
    return list(torch.randint(101, (sum(lengths),), generator=torch.Generator().manual_seed(5)).split(lengths))


def packed_logits(jobs: list[tuple[Case, tuple[int, ...], int]]) -> list[Any]:
    """On a rank: for each (case, lengths of documents, rows), the logits [tokens, V], or the words of a `UserError`."""
    found: list[Any] = []
    for case, lengths, rows in jobs:
        model = parallelize(build_meta(hf_config(case)), case.parsed, source=ModelTensors(loud(case, torch.float32)))
        ids = torch.cat(texts(lengths)).view(rows, -1)
        positions = torch.cat([torch.arange(length) for length in lengths]).view(rows, -1)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        try:
            with exact(), torch.no_grad():
                logits = model(input_ids=ids, position_ids=positions, cu_seqlens=cu_seqlens, use_cache=False).logits
            found.append(logits.flatten(0, 1).numpy())
        except UserError as error:
            found.append(f"{error} / {error.fix}")
    return found


def alone(case: Case, lengths: tuple[int, ...]) -> Tensor:
    """The unmodified model on each document alone."""
    model = loud(case, torch.float64)
    with exact(), torch.no_grad():
        return torch.cat([model(input_ids=text[None], use_cache=False).logits[0] for text in texts(lengths)])


EVEN = (*LENGTHS, 1, 2)  # 64 tokens, which tp 2 divides
# Its two equal tables are computed apart, one of them in fp32 even here; a wrong one shows as 1e-2.
TOLERANCES = {"longrope one table": 1e-6}
BELOW, EQUAL = (ORIGINAL, 5, 11, 16, 14, 2), (32, 32)
ALLOWED = [
    *((kind, EVEN, 1) for kind in FIXED),
    *((kind, lengths, rows) for kind in FOLLOWING for lengths, rows in ((BELOW, 1), (EQUAL, 2), (EQUAL, 1))),
]


@lru_cache
def on_every_rank(layout: str) -> list[Any]:
    """The jobs of `ALLOWED` and then those that are refused, in one call: results by rank."""
    jobs = [*ALLOWED, *((kind, EVEN, 1) for kind in FOLLOWING)]
    cases = [(roped(layout, kind), lengths, rows) for kind, lengths, rows in jobs]
    return run_ranks(cases[0][0].parsed.world, packed_logits, cases)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", range(len(ALLOWED)), ids=lambda i: "-".join(map(str, ALLOWED[i])).replace(" ", ""))
def test_rotary_scaling_in_packed_rows_is_that_of_each_document_alone(layout: str, index: int) -> None:
    """Tables that are fixed, with a document beyond the original positions; tables that follow the length, where all
    documents agree on one. The same whole and under tensor parallelism with the sequence split."""
    kind, lengths, _ = ALLOWED[index]
    expected = alone(roped(layout, kind), lengths)
    for rank in on_every_rank(layout):
        assert (torch.from_numpy(rank[index]) - expected).abs().max() <= TOLERANCES.get(
            kind, 1e-10
        ) * expected.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_documents_that_would_rotate_each_other_are_refused(layout: str, kind: str) -> None:
    """`transformers` takes one table for a micro batch: a short document would depend on a long one beside it."""
    for rank in on_every_rank(layout):
        refusal = rank[len(ALLOWED) + FOLLOWING.index(kind)]
        assert isinstance(refusal, str), "it was computed"
        assert f"rope type {kind}" in refusal and "keep rows and texts to 16 tokens or less" in refusal


@pytest.mark.parametrize("kind", [*FIXED, *FOLLOWING])
def test_the_scalings_change_what_a_model_computes(kind: str) -> None:
    """Else the tests above would see nothing; and for the two that follow the length, the table does change."""
    case, text = roped("single", kind), texts((32,))[0][None]
    overrides = {**dict(case.overrides), "rope_parameters": {"rope_type": "default", **ROPES[kind]}}
    plain = Case("single", case.family, overrides=tuple(overrides.items()))
    with torch.no_grad():
        scaled, unscaled = (loud(each, torch.float64)(input_ids=text).logits[0] for each in (case, plain))
        short = loud(case, torch.float64)(input_ids=text[:, :ORIGINAL]).logits[0]
    assert (scaled - unscaled).abs().max() > 1e-2 * scaled.abs().max()
    follows = (scaled[:ORIGINAL] - short).abs().max() > 1e-2 * scaled.abs().max()
    assert bool(follows) is (kind in FOLLOWING)


def test_a_run_refuses_rows_that_are_too_long_before_it_starts(tmp_path: Path) -> None:
    """Also where the scaling is that of one kind of layers among several."""
    hf_config(roped("single", "longrope")).save_pretrained(tmp_path)
    tokenizer = SimpleNamespace(vocab_size=101, eos_token_id=1)
    data: Any = SimpleNamespace(tokenizer=tokenizer, train=None, validation=None)
    run = {"model": {"name_or_path": str(tmp_path), "init": "random"}, "data": {"seq_length": ORIGINAL + 1}}
    with pytest.raises(UserError, match="rope type longrope") as error:
        build_model(RunConfig.model_validate(run), data)
    assert "equal short_factor and long_factor" in str(error.value.fix)
    run["data"] = {"seq_length": ORIGINAL}
    build_model(RunConfig.model_validate(run), data)
    kinds = {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    kinds |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = hf_config(Case("single", "gemma3", overrides=(("rope_parameters", kinds),)))
    check_lengths(config, 64)
    with pytest.raises(UserError, match="rope type dynamic"):
        check_lengths(config, 65)


# Import and export ----------------------------------------------------------------------------------------------------

# Families that store what others do not: merged and transposed projections, biases, experts in one tensor or one by
# one, latent attention, norms at other places, a scale of the logits.
STORED = ("cohere", "deepseek_v3", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "mixtral", "phi3", "qwen3_moe")
Run = tuple[Path, Path]  # the folder that `transformers` saved, the run that started from it


def layout_of(case: Case) -> str:
    """Tensor parallel, with the sequence split where the family allows it."""
    model = build_meta(hf_config(case))
    anatomy = anatomy_of(model)
    partition = derive(model, anatomy, trace(model, anatomy))
    return "tp2+nosp+fp32" if partition.sequence_parallel_refusal else "tp2+fp32"


def save_runs(jobs: list[tuple[str, Path, Path]]) -> None:
    """On a rank: for each (layout, folder, run), a checkpoint of the folder's weights under the layout."""
    for layout, folder, run in jobs:
        save_run(layout, folder, run, 12)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Run]:
    """Of every family that is asked for, untied or tied: one call for them all."""
    root, jobs = tmp_path_factory.mktemp("families"), {}
    asked = [item for item in request.session.items if item.path == request.path and "runs" in item.fixturenames]
    for family, tied in ((item.callspec.params["family"], item.callspec.params["tied"]) for item in asked):
        case = Case("single", family, tied=tied, overrides=OVERRIDES)
        folder = hf_folder(case, root / f"{family}-{tied}")
        jobs[family, tied] = (layout_of(case), folder, root / "runs" / f"{family}-{tied}")
    run_ranks(2, save_runs, list(jobs.values()))
    return {key: (folder, run) for key, (_, folder, run) in jobs.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        (family, tied) if tied == (at % 2 == 0) and family in STORED else put_off(family, tied)
        for at, family in enumerate(FAMILIES)
        for tied in (False, True)
    ],
)
def test_through_a_run_and_back_changes_no_bit(
    family: str, tied: bool, runs: dict[tuple[str, bool], Run], tmp_path: Path
) -> None:
    """A folder of `transformers` -> cut for tensor parallelism -> checkpoint -> export -> `transformers`."""
    folder, run = runs[family, tied]
    done = export(run, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, done.path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # `eager`: the grouped matmul that is `transformers` own default takes no sizes that 16 bytes do not divide
    plain = partial(AutoModelForCausalLM.from_pretrained, experts_implementation="eager")
    old, new = (plain(path).eval() for path in (folder, done.path))
    assert type(new) is type(old)
    head, embedding = new.get_output_embeddings().weight, new.get_input_embeddings().weight
    assert (head is embedding) is tied
    sized = [tensor for tensor in after.values() if len(tensor) == VOCABULARY and tensor.ndim == 2]
    assert len(sized) == 2 - tied and done.parameters == sum(p.numel() for p in new.parameters())
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        logits = new(ids).logits
        assert torch.equal(old(ids).logits, logits) and logits.std() > 0.01


def test_a_base_model_is_all_there_is_to_a_tied_one(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Folders such as GPT-2's own hold the base model, under names without its prefix."""
    for number, family in enumerate(FAMILIES):
        with subtests.test(msg=family):
            folder = tmp_path / str(number)
            folder.mkdir()
            case = Case("single", family, tied=True)
            model = reference_model(case, torch.float32)
            model.base_model.save_pretrained(folder)
            names = load_file(folder / "model.safetensors")
            assert not [name for name in names if name.startswith(model.base_model_prefix)]
            source = SafetensorsFolder(folder, build_meta(hf_config(case)))
            assert source.names() == set(stored_tensors(model))
            for name, parameter in model.named_parameters():
                assert torch.equal(source.whole(name), parameter), name
            with pytest.raises(UserError, match="base model without its head"):
                SafetensorsFolder(folder, build_meta(hf_config(Case("single", family))))


APERTUS = Case("tp2+fp32", overrides=(*OVERRIDES, ("model_type", "apertus"), ("hidden_act", "xielu")))


@pytest.mark.full
def test_what_a_constructor_computes_is_kept(tmp_path: Path) -> None:
    """Apertus, which is no family: its activation has parameters and stored buffers that only the constructor sets."""
    config = hf_config(APERTUS)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = build_meta(config)
    ours, buffers = RandomInit(model, seed=1), buffer_values(model)
    assert buffers.keys() == dict(theirs.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in theirs.named_buffers())
    scalars = [name for name, parameter in theirs.named_parameters() if parameter.numel() == 1]
    assert len(scalars) == 2 * 3
    assert all(torch.equal(ours.whole(name), theirs.get_parameter(name)) for name in scalars)
    folder = hf_folder(APERTUS, tmp_path / "hf")
    run_ranks(2, save_runs, [(APERTUS.layout, folder, tmp_path / "runs" / "one")])
    done = export(tmp_path / "runs" / "one", tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, done.path))
    assert before.keys() == after.keys() and any(name.endswith("beta") for name in after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    changed = {name: tensor + 1 if name.endswith("0.mlp.act_fn.beta") else tensor for name, tensor in before.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"other values of the buffer model\.layers\.0\.mlp\.act_fn\.beta"):
        SafetensorsFolder(folder, model)


# Vocabularies that nothing divides ------------------------------------------------------------------------------------


def padded(layout: str, family: str, tied: bool) -> Case:
    """A prime vocabulary with rows that the tokenizer never makes."""
    return Case(layout, family, tied=tied, overrides=(("vocab_size", VOCABULARY), ("eos_token_id", None)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "tied"), [put_off("llama", False), ("llama", True), ("cohere", False), put_off("cohere", True)]
)
def test_all_rows_of_a_padded_vocabulary_take_part(family: str, tied: bool) -> None:
    """Logits of every row, and hidden states from every row, with unequal halves of the vocabulary on two ranks."""
    every = VOCABULARY + 1  # tokens, the last row of the vocabulary twice
    assert VOCABULARY % 2
    case = padded("tp2+fp64", family, tied)
    found = run_ranks(2, whole_logits, case, every)
    model = reference_model(case)
    with exact(), torch.no_grad():
        expected = model(input_ids=all_tokens(every), use_cache=False).logits[0]
    assert expected.shape == (every, VOCABULARY) and expected.std() > 0.01
    for rank in found:
        assert (torch.from_numpy(rank) - expected).abs().max() <= 1e-10 * expected.abs().max()


def all_tokens(count: int) -> Tensor:
    """Every token of the vocabulary in one row, mixed, the last one also at the end."""
    mixed = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
    return torch.cat([mixed, torch.full((count - VOCABULARY,), VOCABULARY - 1)])[None]


def whole_logits(case: Case, count: int) -> Any:
    """On a rank: the logits [tokens, V] of the model under the layout."""
    source = ModelTensors(reference_model(case, torch.float32))
    model = parallelize(build_meta(hf_config(case)), case.parsed, source=source)
    ids = all_tokens(count)
    with exact(), torch.no_grad():
        logits = model(input_ids=ids, position_ids=torch.arange(count)[None], use_cache=False).logits
    return logits[0].numpy()


def test_a_part_of_a_row_may_have_the_positions_whose_table_never_changes() -> None:
    """Positions count from 0: the last one of a document of `ORIGINAL` tokens is `ORIGINAL` - 1."""
    config = hf_config(roped("single", "longrope"))
    check_slices(config, torch.arange(ORIGINAL))
    with pytest.raises(UserError, match="rope type longrope"):
        check_slices(config, torch.arange(ORIGINAL + 1))
