"""`fivefold generate` of a Hugging Face folder and of a run, here and over workers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.core.errors import UserError
from fivefold.generation import GenerateRequest
from fivefold.generation.launch import start
from tests.checkpoint.folders import OVERRIDES, hf_folder, save_run
from tests.generation.ranks import from_folder
from tests.parity import Case
from tests.pool import run_ranks

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


@pytest.mark.parametrize("layout", ["single", "shard2", "tp2", "shard2.tp2", "dp2.tp2+fp64"])
@pytest.mark.parametrize("kind", ["hf", "run"])
def test_the_text_is_that_of_transformers(folder: Path, expected: str, kind: str, layout: str) -> None:
    world = Case(layout).parsed.world
    results = run_ranks(world, from_folder, folder.parent / kind, layout, TOKENS)
    assert [text for text, _ in results] == [expected] * world
    assert [screen for _, screen in results] == [PROMPT + expected] + [""] * (world - 1)


@pytest.mark.parametrize("layout", ["single", "tp2"])
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
