"""`fivefold generate` of a Hugging Face folder and of a run, here and over workers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.core.errors import UserError
from fivefold.generation import GenerateRequest, start
from tests.checkpoint.folders import OVERRIDES, hf_folder, save_run
from tests.generation.ranks import from_folder
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

PROMPT, TOKENS = "def naïve(", 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    folder = hf_folder(Case("single+fp32", kv_heads=1, overrides=OVERRIDES), root / "hf")
    run_ranks(2, save_run, "tp2+fp32", folder, root / "run", 3)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    out = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, top_p=None, temperature=None, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("hf", "single"),
        ("run", "shard2.tp2"),
        *(put_off("run", layout) for layout in ("single", "shard2", "tp2", "dp2.tp2+fp64")),
        *(put_off("hf", layout) for layout in ("shard2", "tp2", "shard2.tp2", "dp2.tp2+fp64")),
    ],
)
def test_the_text_is_that_of_transformers(folder: Path, expected: str, kind: str, layout: str) -> None:
    world = Case(layout).parsed.world
    results = run_ranks(world, from_folder, folder.parent / kind, layout, TOKENS)
    assert [text for text, _ in results] == [expected] * world
    assert [screen for _, screen in results] == [PROMPT + expected] + [""] * (world - 1)


@pytest.mark.parametrize("layout", [put_off("single"), "tp2"])
def test_the_command(folder: Path, expected: str, layout: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(folder.parent / "run")
    request = GenerateRequest(model=run, prompt=PROMPT, layout=layout, max_new_tokens=TOKENS, temperature=0.0)
    text = start(request)
    assert text == expected
    assert capfd.readouterr().out == f"{PROMPT}{expected}\n"


def test_what_is_not_there(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="neither a run folder, a model folder nor a hub id"):
        start(GenerateRequest(model=str(tmp_path / "absent"), prompt="a"))
    with pytest.raises(UserError, match=r"no checkpoint of step 4\nsteps: 3"):
        start(GenerateRequest(model=str(folder.parent / "run"), prompt="a", step=4))
    with pytest.raises(UserError, match="temperature -1 is less than 0"):
        start(GenerateRequest(model=str(folder), prompt="a", temperature=-1))
    with pytest.raises(UserError, match="is not a run folder, so it has no step 4"):
        start(GenerateRequest(model=str(folder), prompt="a", step=4))


@pytest.fixture(scope="module")
def asking(folder: Path) -> Path:
    """The same model, whose generation config asks for more: what is honoured, and what is not."""
    asking = folder.parent / "asking"
    shutil.copytree(folder, asking)
    settings = {"eos_token_id": 256, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4,
                "suppress_tokens": [101], "num_beams": 3, "temperature": 0.6, "do_sample": True}  # fmt: skip
    (asking / "generation_config.json").write_text(json.dumps(settings))
    return asking


def of_transformers(folder: Path, prompt: str, **options: Any) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    out = model.generate(
        ids, do_sample=False, num_beams=1, max_new_tokens=TOKENS, pad_token_id=0, tokenizer=tokenizer, **options
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_what_the_folder_asks_for_is_done_or_named(
    asking: Path, folder: Path, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = of_transformers(asking, PROMPT)
    assert wanted != expected
    text = start(GenerateRequest(model=str(asking), prompt=PROMPT, max_new_tokens=TOKENS, temperature=0.0))
    screen = capfd.readouterr()
    assert text == wanted and screen.out == f"{PROMPT}{wanted}\n"
    named = "not used of the model's generation_config.json: do_sample True, num_beams 3, temperature 0.6"
    assert named in screen.err
    start(GenerateRequest(model=str(asking), prompt=PROMPT, max_new_tokens=TOKENS, temperature=0.0), quiet=True)
    assert "not used" not in capfd.readouterr().err


def test_each_prompt_of_a_batch_has_its_own_penalties(asking: Path, tmp_path: Path) -> None:
    prompts = [PROMPT, "a", "the end of the world, the end"]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': each})}\n" for each in prompts))
    out = tmp_path / "out.jsonl"
    start(
        GenerateRequest(
            model=str(asking), prompts=str(tmp_path / "prompts.jsonl"), out=str(out), layout="tp2",
            max_new_tokens=TOKENS, temperature=0.0,
        )
    )  # fmt: skip
    found = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
    assert found == [of_transformers(asking, each) for each in prompts]


def test_stop_strings_of_the_folder_end_a_text_that_does_not_have_them(asking: Path, tmp_path: Path) -> None:
    shutil.copytree(asking, tmp_path / "stops")
    stop = of_transformers(asking, PROMPT)[5:7]
    settings = json.loads((asking / "generation_config.json").read_text()) | {"stop_strings": ["never", stop]}
    (tmp_path / "stops" / "generation_config.json").write_text(json.dumps(settings))
    wanted = of_transformers(tmp_path / "stops", PROMPT)
    assert wanted.endswith(stop)
    request = GenerateRequest(model=str(tmp_path / "stops"), prompt=PROMPT, max_new_tokens=TOKENS, temperature=0.0)
    assert start(request, quiet=True) == wanted.removesuffix(stop)


def test_an_adapter_in_the_folder_of_its_base_is_part_of_the_model(folder: Path, expected: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    both = tmp_path / "both"
    shutil.copytree(folder, both)
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=3, lora_alpha=40, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(both)
    wanted = of_transformers(both, PROMPT)
    assert wanted != expected
    for layout in ("single", "tp2"):
        request = GenerateRequest(model=str(both), prompt=PROMPT, max_new_tokens=TOKENS, temperature=0.0, layout=layout)
        assert start(request, quiet=True) == wanted
