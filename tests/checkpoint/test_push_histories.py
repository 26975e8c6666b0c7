"""A push over whatever a repository had before: it then contains what was pushed, and what others put there."""

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

import fivefold as ff
from fivefold import cli
from fivefold.checkpoint import card, export, push
from fivefold.checkpoint.export import Exported
from fivefold.core.errors import UserError
from fivefold.core.hub import Repository
from tests import fake_hub
from tests.tiers import put_off
from tests.training.bodies import run_dir, run_file, train

pytest.importorskip("peft")

NAME = "me/it"
STEPS = {"earlier": 2, "pushed": 4}
SHARD = 20_000  # bytes: a few files
STALE = {  # of earlier models: other forms of weights, and what is read next to them
    "pytorch_model-00001-of-00002.bin": b"old", "pytorch_model.bin.index.json": b"{}", "tf_model.h5": b"old",
    "model.fp16-00001-of-00002.safetensors": b"old", "pytorch_model-00001-of-00002.fp16.bin": b"old",
    "model.fp16.safetensors": b"old", "model.safetensors.index.json": b"{}", "flax_model.msgpack": b"old",
    "adapter_model.bin": b"old", "chat_template.json": b"{}", "additional_chat_templates/rag.jinja": b"old",
    "tokenizer.model": b"old", "added_tokens.json": b'{"<old>": 999}', "preprocessor_config.json": b"{}",
}  # fmt: skip
OTHERS = {
    "train.py": b"print()", "eval/results.json": b"{}", "checkpoint-5/model.safetensors": b"theirs",
    "training_args.bin": b"theirs", ".gitignore": b"*.safetensors\n*.json\n",
}  # fmt: skip
CARD = "---\nlicense: mit\nlanguage: de\ntags: [story]\n---\n# Theirs\n\nBy hand.\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of all weights, and one of an adapter on its result: each with the checkpoints of `STEPS`."""
    folder = tmp_path_factory.mktemp("histories")
    options = {"train__max_steps": 4, "checkpoint__every": 2}
    whole = run_file(folder, run__name="whole", checkpoint__export_hf=True, **options)
    assert train(whole).error is None
    base = str(run_dir(whole) / "hf")
    lora = run_file(folder, run__name="lora", optimizer__learning_rate=0.1, **options)
    lora |= {"model": {"name_or_path": base}, "tokenizer": {"name_or_path": base}, "adapter": {"name": "lora"}}
    assert train(lora).error is None
    return {"whole": run_dir(whole), "lora": run_dir(lora)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    with fake_hub.running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
        yield hub


def given(runs: dict[str, Path], kind: str, when: str, out: Path, to: Repository) -> Exported:
    """Export and push one of four kinds."""
    run = runs["whole" if kind in ("file", "shards") else "lora"]
    size = SHARD if kind == "shards" else 10**9
    return export(run, out, step=STEPS[when], merge=kind == "merged", push=to, file_bytes=size)


def history(hub: fake_hub.Hub, runs: dict[str, Path], kind: str, folder: Path) -> None:
    if kind == "foreign":
        hub.create(NAME, private=False)
        hub.put(NAME, "main", {**STALE, **OTHERS, "README.md": CARD.encode()})
    elif kind != "empty":
        given(runs, kind, "earlier", folder / "earlier", Repository(NAME))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


BEFORE, KINDS = ("empty", "file", "shards", "adapter", "merged", "foreign"), ("file", "shards", "adapter", "merged")
# One of each kind over each history that it could mix with; the others only in a campaign.
CORE = {("file", "shards"), ("shards", "file"), ("adapter", "merged"), ("merged", "adapter"), ("foreign", "merged")}
CASES = [case if case in CORE else put_off(*case) for case in product(BEFORE, KINDS)]


@pytest.mark.full
@pytest.mark.parametrize(("before", "kind"), CASES)
@pytest.mark.parametrize("branch", [None, put_off("next")])
def test_a_repository_has_what_was_pushed(
    hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path, before: str, kind: str, branch: str | None
) -> None:
    history(hub, runs, before, tmp_path)
    old = {path: dict(files) for path, files in hub.files.items()}
    done = given(runs, kind, "pushed", tmp_path / "out", Repository(NAME, revision=branch))
    found, out = dict(hub.files[NAME, branch or "main"]), files_of(tmp_path / "out")
    found.pop(".gitattributes")
    if before == "foreign":
        assert done.push is not None and {*OTHERS} < {*done.push.kept} and {*done.push.removed} <= {*STALE}
        assert {name: found.pop(name) for name in OTHERS} == OTHERS
        text = found["README.md"].decode()
        front = yaml.safe_load(text.split("---")[1])
        assert front["license"] == "mit" and front["language"] == "de" and {"story", "fivefold"} <= {*front["tags"]}
        assert "# Theirs\n\nBy hand.\n" in text and "Trained with fivefold." in text
        found["README.md"] = out["README.md"]
    assert found == out
    if branch and before != "empty":
        assert hub.files[NAME, "main"] == old[NAME, "main"]
    there = written(found, tmp_path / "there")
    torch.testing.assert_close(logits(there), logits(tmp_path / "out"), rtol=0, atol=0)
    same = [AutoTokenizer.from_pretrained(folder) for folder in (there, tmp_path / "out")]
    assert same[0].get_vocab() == same[1].get_vocab() and same[0].chat_template == same[1].chat_template


@pytest.mark.full
def test_a_refused_export_creates_no_repository(hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    to = Repository(NAME)
    refused: list[Callable[[], Any]] = [
        lambda: export(tmp_path / "none", tmp_path / "out", push=to),
        lambda: export(runs["whole"], tmp_path / "there", push=to),
        lambda: export(runs["whole"], tmp_path / "out", step=3, push=to),
        lambda: export(runs["whole"], tmp_path / "out", merge=True, push=to),
        lambda: export(runs["whole"], tmp_path / "out", dtype="int8", push=to),
    ]
    for ask in refused:
        with pytest.raises(UserError):
            ask()
        assert hub.repositories == {}


@pytest.mark.full
def test_who_may_see_it(hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, options in {"me/new": {}, "me/public": {"public": True}, "me/private": {"private": True}}.items():
        ff.export(runs["whole"], out, force=True, push=name, **options)
    assert hub.repositories == {"me/new": True, "me/public": False, "me/private": True}
    ff.export(runs["whole"], out, force=True, push="me/public")  # without a word it stays as it is
    for name, options, said in (
        ("me/public", {"private": True}, "me/public is public"), ("me/new", {"public": True}, "me/new is private"),
        ("me/new", {"public": True, "private": True}, "both asked for"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            ff.export(runs["whole"], tmp_path / "refused", push=name, **options)
    hub.role = "read"
    for name, said in (("me/new", "does not let you write"), ("me/other", "may only read")):
        with pytest.raises(UserError, match=said):
            ff.export(runs["whole"], tmp_path / "refused", push=name)
    assert not (tmp_path / "refused").exists() and "me/other" not in hub.repositories


MIXED = [
    "it-Q4_K_M.gguf", "gguf/it.gguf", "onnx/model.onnx", "consolidated.safetensors", "original/consolidated.00.pth",
    "params.json", "model_index.json", "modules.json", "ema.safetensors", "hf_quant_config.json",
]  # fmt: skip


@pytest.mark.full
def test_files_that_would_mix_are_refused(
    hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.create(NAME, private=True)
    out = tmp_path / "out"
    for name in MIXED:
        hub.files[NAME, "main"] = {name: b"theirs", "notes.md": b"theirs"}
        with pytest.raises(UserError, match=name) as refused:
            export(runs["whole"], out, push=Repository(NAME))
        assert "remove them there first" in str(refused.value.fix) and not out.exists()
    hub.files[NAME, "main"] = {"notes.md": b"theirs", "tokenizer.model": b"old"}
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(runs["whole"]), str(out), "--push", NAME])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and hub.files[NAME, "main"] == {**files_of(out), "notes.md": b"theirs"}
    assert "kept: notes.md\n" in said and "removed: tokenizer.model; commit " in said


@pytest.mark.full
def test_only_files_of_the_manifest_leave(hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("whole", "lora"):
        (model,) = runs[kind].glob("checkpoints/step-*4/model")
        strays = [model / name for name in (".env", "notes.py", "vocab_of_mine.txt")]
        try:
            for stray in strays:
                stray.write_text("secret")
            export(runs[kind], tmp_path / kind, push=Repository(f"me/{kind}"))
        finally:
            for stray in strays:
                stray.unlink()
        pushed = hub.files[f"me/{kind}", "main"]
        assert "tokenizer.json" in pushed and not {stray.name for stray in strays} & pushed.keys()


@pytest.mark.full
def test_a_commit_that_comes_between_is_kept(hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path) -> None:
    export(runs["whole"], tmp_path / "out", step=2, push=Repository(NAME))
    changed = hub.files[NAME, "main"]["README.md"] + b"\n## Mine\n\nA section.\n"
    hub.meanwhile = lambda: hub.put(NAME, "main", {"README.md": changed, "mine.py": b"1"})
    done = export(runs["whole"], tmp_path / "out", force=True, push=Repository(NAME))
    found = hub.files[NAME, "main"]
    assert found["mine.py"] == b"1" and b"## Mine\n\nA section.\n" in found["README.md"]
    assert found["README.md"].count(b"Trained with fivefold.") == 1 and b"| steps | 4 |" in found["README.md"]
    assert done.push is not None and done.push.kept == ("mine.py", "what others wrote into README.md")

    def again() -> None:
        hub.put(NAME, "main", {"mine.py": b"2"})
        hub.meanwhile = again

    hub.meanwhile = again
    with pytest.raises(UserError, match=r"412.*is complete"):
        export(runs["whole"], tmp_path / "out", step=2, force=True, push=Repository(NAME))
    assert b"| steps | 4 |" in found["README.md"]


@pytest.mark.full
def test_an_upload_that_fails_leaves_the_repository_as_it_was(
    hub: fake_hub.Hub, runs: dict[str, Path], tmp_path: Path
) -> None:
    export(runs["whole"], tmp_path / "out", step=2, push=Repository(NAME))
    old = dict(hub.files[NAME, "main"])
    hub.status, hub.fails_at = 400, "commit"
    with pytest.raises(UserError, match=r"the hub answered 400: no; .* is complete"):
        export(runs["lora"], tmp_path / "adapter", push=Repository(NAME))
    assert hub.files[NAME, "main"] == old


@pytest.mark.parametrize(
    ("status", "fix"),
    [(413, "that is mended"), (422, "that is mended"), (412, "others do not commit to it"), (501, "the hub answers")],
)
def test_the_advice_fits_the_answer(hub: fake_hub.Hub, tmp_path: Path, status: int, fix: str) -> None:
    files = {"README.md": b"# it\n"}
    hub.status, hub.fails_at = status, "preupload"
    with pytest.raises(UserError, match=f"was not pushed: the hub answered {status}: no; .* is complete") as refused:
        push.push_folder(Repository(NAME), written(files, tmp_path), files, "it")
    assert f"again when {fix} " in str(refused.value.fix)


@pytest.mark.parametrize("status", [None, 504])
def test_a_lost_answer_to_a_commit_is_no_refusal(hub: fake_hub.Hub, tmp_path: Path, status: int | None) -> None:
    files = {"README.md": b"# it\n"}
    hub.loses, hub.status, hub.fails_at = status is None, status, "commit"
    with pytest.raises(UserError, match=r"me/it may have been pushed or not: .* is complete") as refused:
        push.push_folder(Repository(NAME), written(files, tmp_path), files, "it")
    assert "look at the commits" in str(refused.value.fix)
    assert ("README.md" in hub.files[NAME, "main"]) == (status is None)


def test_a_branch_has_files_and_a_card_of_its_own(hub: fake_hub.Hub, tmp_path: Path) -> None:
    """The name of the branch is no path in an address."""
    hub.create(NAME, private=True)
    theirs = b"\xef\xbb\xbf---\r\nlicense: mit\r\n---\r\n# Main\r\n"
    hub.put(NAME, "main", {".gitignore": b"*.safetensors", "README.md": theirs, "tokenizer.json": b"old"})
    files = {"README.md": b"# it\n\nTrained with fivefold.\n", "model.safetensors": b"new"}
    given = written(files, tmp_path), files, "it"
    done = push.push_folder(Repository(NAME, revision="v/2"), *given)
    others = "what others wrote into README.md"
    assert done.kept == (".gitignore", others) and done.removed == ("tokenizer.json",)
    hub.put(NAME, "v/2", {"mine.py": b"2", "README.md": hub.files[NAME, "v/2"]["README.md"] + b"\n# Mine\n"})
    hub.put(NAME, "main", {"late.py": b"3"})
    done = push.push_folder(Repository(NAME, revision="v/2"), *given)
    assert done.kept == (".gitignore", "mine.py", others) and done.removed == () and done.address.endswith("/tree/v/2")
    found = {name: content.decode() for name, content in hub.files[NAME, "v/2"].items()}
    assert found["model.safetensors"] == "new" and found["README.md"].startswith("---\nlicense: mit\n---\n")
    assert re.findall("#.*", found["README.md"]) == ["# it", "# Main", "# Mine"] and "\r" not in found["README.md"]


def test_a_push_takes_three_commits_of_others_and_says_what_it_replaced(hub: fake_hub.Hub, tmp_path: Path) -> None:
    ours = (
        b"---\nlibrary_name: transformers\nlicense: unknown\ntags:\n- fivefold\n---\n\n# it\n\nTrained with fivefold.\n"
    )
    files = {"README.md": ours, "model.safetensors": b"new"}
    given = written(files, tmp_path), files, "it"
    assert push.push_folder(Repository(NAME), *given).kept == () and hub.messages == ["it"]
    left = iter("ab")

    def commit() -> None:
        hub.put(NAME, "main", {f"{next(left)}.py": b""})
        hub.meanwhile = commit if hub.files[NAME, "main"].keys() < {*files, ".gitattributes", "a.py", "b.py"} else None

    hub.meanwhile = commit
    done = push.push_folder(Repository(NAME), *given)
    assert done.kept == ("a.py", "b.py") and done.before == hub.commits[NAME, "main"][-2]
    hub.put(NAME, "main", {"it.gguf": b"theirs"})  # since the check
    with pytest.raises(UserError, match=r"it\.gguf"):
        push.push_folder(Repository(NAME), *given)


def test_a_card_keeps_what_others_wrote() -> None:
    terms = "of the base model and of the data apply.\n"
    ours = (
        "---\nlibrary_name: peft\nlicense: mit\ntags: [fivefold, lora]\nbase_model: org/base\n"
        "base_model_relation: adapter\n---\n\n# run\n\nTrained with fivefold.\n\n| base model | org/base |\n\n"
        f"Licence of the base model: mit. The terms {terms}"
    )
    new = (
        "---\nlibrary_name: transformers\nlicense: unknown\ntags:\n- fivefold\n---\n\n"
        f"# next\n\nTrained with fivefold.\n\nLicence: unknown. Those {terms}"
    )
    assert card.merged_card("", new) == card.merged_card(ours, new) == card.merged_card(new, new) == new
    theirs = ours.replace("lora]\n", "lora, base]\nlanguage: de\n") + "\nBehind.\n"
    theirs = theirs.replace("# run", "Before.\n\n# run")
    lines = ["Before.", "# next", "Behind."]
    for _ in range(2):
        theirs = card.merged_card(theirs, new)
        front = yaml.safe_load(theirs.split("---")[1])
        assert front.pop("tags") == ["fivefold", "base"]
        assert front == {"library_name": "transformers", "license": "unknown", "language": "de"}
        assert [line for line in theirs.splitlines() if line in lines] == lines
        assert theirs.count("Trained with fivefold.") == 1
    assert "## Mine\n\nMiddle.\n" in card.merged_card(ours.replace("| base", "## Mine\n\nMiddle.\n\n| base"), new)
    assert card.merged_card(ours + ours.split("---")[2], new) == new

    def front_of(theirs: str) -> Any:
        return yaml.safe_load(card.merged_card(theirs, new).split("---")[1])

    found = front_of("---\ntags: story\nlicense: mit\n---\n")
    assert found["tags"] == ["fivefold", "story"] and found["license"] == "mit"
    theirs = ours.replace("mit\n", "mit\ndatasets: [org/data, org/more]\n", 1).replace("base |", "base, org/data |")
    assert front_of(theirs)["datasets"] == ["org/more"]
    theirs = new.replace("license: unknown", "license: mit").replace("Licence:", "Of org/by-mit.\n\nLicence:")
    assert front_of(theirs)["license"] == "mit"


def test_a_card_that_cannot_be_read_is_named() -> None:
    for content in (b"\xff", b"---\n: [\n---\n", b"---\n- a\n---\n"):
        with pytest.raises(UserError, match=r"me/it was not pushed: its README\.md"):
            push._text(NAME, content)


def test_names_of_files_of_models() -> None:
    assert push._of_models(STALE) == {*STALE} and not push._of_models(OTHERS) and not push._mixed(OTHERS)
    more = [
        "quantize_config.json", "quant_config.json", "x.safetensors.index.json", "onnx/model.onnx_data_1", "a.tflite",
        "openvino_model.xml", "openvino_model.bin", "a.mlmodel", "rust_model.ot",
    ]  # fmt: skip
    assert push._mixed([*MIXED, *more, *STALE]) == {*MIXED, *more}
    variants = {"model.safetensors.index.fp16.json", "pytorch_model.bin.index.fp16.json", "tf_model.h5.index.json"}
    assert push._of_models(variants) == variants
