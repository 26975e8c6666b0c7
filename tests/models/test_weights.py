"""Weights: drawn by the recipe of the model, or read from safetensors; any region alone equals the same cut of all."""

import json
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fivefold.core.alike import WHOLE, difference, digests, program, sampled
from fivefold.core.errors import UserError
from fivefold.models import merged, random_stream
from fivefold.models.build import build_meta
from fivefold.models.random_stream import Normal, RandomStream, TruncatedNormal, Uniform, philox
from fivefold.models.recipe import Constant, check_drawable, read_recipe
from fivefold.models.sources import RandomInit, SafetensorsFolder, digest_of_samples, folder_digests
from tests.models import tiny

DISTRIBUTIONS = [Normal(0.5, 2.0), Uniform(-1.0, 3.0), TruncatedNormal(0.0, 1.0, -1.5, 2.0)]


# The stream ----------------------------------------------------------------------------------------------------------


def test_philox_gives_the_published_answers():
    """Known answers of Random123 (kat_vectors, philox4x32 of 10 rounds)."""
    words = philox(np.zeros(1, dtype=np.uint64), (0, 0))[:, 0]
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_a_region_is_the_cut_of_the_whole(subtests):
    shapes = [(1,), (7,), (131072 + 5,), (67, 101), (4, 33, 29), (3, 70001)]
    for shape, distribution in product(shapes, DISTRIBUTIONS):
        with subtests.test(shape=shape, distribution=type(distribution).__name__):
            stream = RandomStream(3, "layer.weight", shape)
            full = stream.draw(tuple(slice(0, size) for size in shape), distribution)
            generator = np.random.default_rng(0)
            for _ in range(6):
                edges = [sorted(generator.integers(0, size + 1, 2)) for size in shape]
                region = tuple(slice(int(a), int(b)) for a, b in edges)
                assert torch.equal(stream.draw(region, distribution), full[region])
            for dim, size in enumerate(shape):  # the splits of layouts: even and uneven pieces of one dim
                for pieces in (2, 3):
                    cuts = [round(i * size / pieces) for i in range(pieces + 1)]
                    regions = [
                        tuple(slice(cuts[i], cuts[i + 1]) if d == dim else slice(None) for d in range(len(shape)))
                        for i in range(pieces)
                    ]
                    assert torch.equal(torch.cat([stream.draw(region, distribution) for region in regions], dim), full)


@pytest.mark.parametrize("doubt", [random_stream._DOUBT, 1e-3], ids=["as it is", "all doubted"])
def test_normal_numbers_are_those_of_numpys_cosines_to_the_last_bit(doubt, monkeypatch):
    """So that a seed gives the weights that it gave before torch's were asked."""
    monkeypatch.setattr(random_stream, "_DOUBT", doubt)
    words = philox(np.arange(2**17, dtype=np.uint64), (5, 6))
    words[1, :6] = words[3, :6] = [0, 2**30, 2**31, 3 * 2**30, 2**31 - 1, 2**32 - 1]
    for mean, std in ((0.0, 0.02), (1.0, 1e-3), (-0.5, 2.0)):
        expected = np.empty(words.shape)
        for first in (0, 2):
            radius = np.sqrt(-2.0 * np.log((words[first] + 0.5) * 2.0**-32)) * std
            angle = words[first + 1] * (2.0 * np.pi / 2**32)
            expected[first], expected[first + 1] = radius * np.cos(angle) + mean, radius * np.sin(angle) + mean
        assert np.array_equal(Normal(mean, std)(words), expected.astype(np.float32))


def test_two_cosines_differ_by_less_than_their_doubt():
    angle = np.arange(0, 2**32, 2**14 - 1) * (2.0 * np.pi / 2**32)
    for exact, fast in ((np.cos, torch.cos), (np.sin, torch.sin)):
        off = np.abs(fast(torch.from_numpy(angle)).numpy() - exact(angle))
        assert (off * 4 <= np.abs(exact(angle)) * random_stream._DOUBT).all()
    assert 1.0 - random_stream._DOUBT < 1.0 - 2.0**-52, "more than an ulp or two"


def test_a_stream_is_the_same_drawn_by_any_number_of_threads(monkeypatch):
    """A row is longer than what a thread draws at once: its end is that which is drawn alone."""
    stream, far = RandomStream(1, "w", (3, 1_100_003)), 64 * random_stream._BLOCK + 5

    def draw(threads, first=1):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return stream.draw((slice(None), slice(first, None)), Normal(0.0, 1.0))

    assert torch.equal(draw(1), draw(5)) and torch.equal(draw(5)[:, far - 1 :], draw(1, far))


def test_a_thread_that_raises_is_heard():
    def fail(_):
        raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"):
        RandomStream(1, "w", (2, 1_100_003)).draw((slice(None), slice(None)), fail)


def test_statistics():
    """A million numbers: mean within 5 standard errors, moments and tails of the distribution."""
    shape, region = (1000, 1000), (slice(None), slice(None))
    normal = RandomStream(0, "w", shape).draw(region, Normal(0.0, 1.0)).double()
    assert abs(normal.mean()) < 5e-3 and abs(normal.std() - 1) < 5e-3
    assert abs((normal**3).mean()) < 0.02 and abs((normal**4).mean() - 3) < 0.05
    assert abs((normal.abs() > 2).double().mean() - 0.0455) < 2e-3
    assert 4.5 < normal.abs().max() < 6.8
    neighbours = normal.reshape(-1)
    for lag in (1, 2, 4, 1000):
        assert abs((neighbours[lag:] * neighbours[:-lag]).mean()) < 5e-3
    uniform = RandomStream(0, "w", shape).draw(region, Uniform(-1.0, 3.0)).double()
    assert -1 <= uniform.min() < -0.999 and 2.999 < uniform.max() <= 3
    assert abs(uniform.mean() - 1) < 6e-3 and abs(uniform.std() - 4 / 12**0.5) < 6e-3
    cut = RandomStream(0, "w", shape).draw(region, TruncatedNormal(0.0, 1.0, -2.0, 2.0)).double()
    assert cut.abs().max() <= 2 and abs(cut.mean()) < 5e-3 and abs(cut.std() - 0.8796) < 5e-3


def test_streams_differ_by_name_and_seed_and_repeat():
    def draw(seed, name):
        return RandomStream(seed, name, (64,)).draw((slice(None),), Normal(0.0, 1.0))

    assert torch.equal(draw(1, "a"), draw(1, "a"))
    assert not torch.equal(draw(1, "a"), draw(2, "a")) and not torch.equal(draw(1, "a"), draw(1, "b"))
    assert abs(torch.corrcoef(torch.stack([draw(1, "a"), draw(1, "b")]))[0, 1]) < 0.5


# The recipe ----------------------------------------------------------------------------------------------------------


def test_weights_have_the_statistics_of_the_models_own_initialisation(make_config):
    """Mean and spread of every parameter as in a model that `transformers` initialised; constants exactly."""
    config = make_config(hidden_size=96, vocab_size=499)
    torch.manual_seed(0)
    theirs = type(build_meta(config))(config)
    ours = tiny.filled(config)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.std() == 0 or mine.ndim == 1:
            assert torch.equal(mine, other), name
            continue
        error = 5 * other.std() / other.numel() ** 0.5
        assert abs(mine.mean() - other.mean()) < 1.5 * error and abs(mine.std() - other.std()) < error, name
        assert torch.equal((mine == 0).all(1), (other == 0).all(1)), name  # the padding row, also when tied
    assert (ours.model.embed_tokens.weight[7] == 0).all()


def test_random_regions_equal_cuts_and_casting_comes_after(make_config):
    source = RandomInit(build_meta(make_config()), seed=5)
    for name in source.names():
        full = source.whole(name)
        assert full.dtype == torch.float32
        region = tuple(slice(size // 3, size - size // 5) for size in source.shape(name))
        assert torch.equal(source.read(name, region), full[region]), name
    twice = build_meta(make_config()).to(torch.bfloat16)
    assert torch.equal(RandomInit(twice, 5).whole("model.norm.weight").float(), torch.ones(48))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(RandomInit(twice, 5).whole(name), source.whole(name).bfloat16())


def test_reading_the_recipe_leaves_the_model_as_it_was(make_config):
    model = build_meta(make_config())
    before = dict(model.named_parameters(remove_duplicate=False))
    recipe = read_recipe(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    assert recipe.keys() == {*dict(model.named_parameters()), *dict(model.named_buffers())}


def test_a_model_that_holds_weights_is_not_initialised_again():
    with pytest.raises(UserError, match="not on the meta device"):
        read_recipe(tiny.filled(tiny.llama()))


def with_init(monkeypatch, initialise):
    """A Llama whose embedding is initialised by `initialise(weight)`."""
    model = build_meta(tiny.llama())
    original = type(model)._init_weights

    def init_weights(self, module):
        original(self, module)
        if isinstance(module, nn.Embedding):
            initialise(module.weight)

    monkeypatch.setattr(type(model).__mro__[1], "_init_weights", init_weights)
    return build_meta(tiny.llama())


NAME = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("initialise", "std"),
    [
        (nn.init.xavier_normal_, (2 / (101 + 48)) ** 0.5),
        (nn.init.xavier_uniform_, (2 / (101 + 48)) ** 0.5),
        (lambda w: nn.init.kaiming_uniform_(w, a=5**0.5), (1 / 3 / 48) ** 0.5),
        (lambda w: nn.init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"), (2 / 101) ** 0.5),
        (lambda w: nn.init.trunc_normal_(w, std=0.3, a=-9, b=9), 0.3),
        (lambda w: nn.init.constant_(w, 4.0), 0.0),
    ],
    ids=["xavier_normal", "xavier_uniform", "kaiming_uniform", "kaiming_normal", "trunc_normal", "constant"],
)
def test_initialisers(initialise, std, monkeypatch):
    # Through the module at the time of the call, as models do it.
    name = getattr(initialise, "__name__", "")
    call = initialise if name == "<lambda>" else lambda w: getattr(nn.init, name)(w)
    source = RandomInit(with_init(monkeypatch, call), 0)
    assert abs(source.whole(NAME).std().item() - std) <= 0.05 * std


def test_parts_of_a_parameter_initialised_apart(monkeypatch):
    def initialise(weight):
        nn.init.zeros_(weight)
        nn.init.ones_(weight[10:20])
        nn.init.constant_(weight[:, 40:], 2.0)
        nn.init.constant_(weight[3, 5:7], 3.0)

    values = RandomInit(with_init(monkeypatch, initialise), 0).whole(NAME)
    expected = torch.zeros(101, 48)
    expected[10:20], expected[:, 40:], expected[3, 5:7] = 1, 2, 3
    assert torch.equal(values, expected)


@pytest.mark.parametrize(
    ("initialise", "word"),
    [
        (lambda w: nn.init.orthogonal_(w), "orthogonal_"),
        (lambda w: w.data.mul_(0.5), "mul_"),
        (lambda w: nn.init.zeros_(w[::2]), "no region of slices"),
        (lambda w: nn.init.zeros_(w.t()), "no region of slices"),
    ],
    ids=["orthogonal", "in place", "stepped", "transposed"],
)
def test_what_cannot_be_drawn_in_pieces_is_named(initialise, word, monkeypatch):
    with pytest.raises(UserError, match=word) as error:
        RandomInit(with_init(monkeypatch, initialise), 0)
    assert NAME in str(error.value)


def test_a_parameter_without_a_recipe_is_named():
    model = build_meta(tiny.llama())
    model.extra = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match="extra is not initialised"):
        RandomInit(model, 0)
    recipe = read_recipe(model)
    check_drawable(recipe, ["model.norm.weight"])
    assert recipe["model.norm.weight"][0].fill == Constant(1.0)


# Safetensors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    def save(config, *, dtype=torch.float32, **kwargs):
        model = tiny.filled(config, dtype=dtype, biases=True)
        model.save_pretrained(tmp_path, **kwargs)
        return model, tmp_path

    return save


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"max_shard_size": "40KB"}], ids=["one file", "several files"])
def test_round_trip(make_config, saved, dtype, kwargs):
    model, folder = saved(make_config(), dtype=dtype, **kwargs)
    assert len(list(folder.glob("*.safetensors"))) == (1 if not kwargs else len(list(folder.glob("*-of-*"))))
    source = SafetensorsFolder(folder, build_meta(make_config()))
    parameters = dict(model.named_parameters())
    assert source.names() == parameters.keys()
    for name, tensor in parameters.items():
        assert torch.equal(source.whole(name), tensor) and source.whole(name).dtype == dtype
        region = tuple(slice(size // 3, size - 1) for size in tensor.shape)
        assert torch.equal(source.read(name, region), tensor[region])
        assert source.read(name, tuple(slice(2, 2) for _ in tensor.shape)).numel() == 0


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_keys_that_models_compute_for_themselves_and_a_tied_head_may_be_there(saved):
    model, folder = saved(tiny.qwen3())
    head = model.get_input_embeddings().weight.detach().clone()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6), "lm_head.weight": head}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "lm_head.weight" not in SafetensorsFolder(folder, build_meta(tiny.qwen3())).names()


def test_names_that_do_not_fit_are_listed(saved):
    _, folder = saved(tiny.llama())
    rewrite(folder, lambda tensors: tensors.update(surplus=tensors.pop("model.norm.weight")))
    with pytest.raises(UserError, match=r"missing model\.norm\.weight; not used surplus"):
        SafetensorsFolder(folder, build_meta(tiny.llama()))


def test_shapes_that_do_not_fit_are_both_shown(saved):
    _, folder = saved(tiny.llama())
    with pytest.raises(UserError, match=r"lm_head\.weight is \(101, 48\) there, \(128, 48\) here"):
        SafetensorsFolder(folder, build_meta(tiny.llama(vocab_size=128)))


def test_a_base_model_without_its_head_is_recognised(saved):
    model, folder = saved(tiny.llama())
    model.model.save_pretrained(folder)
    with pytest.raises(UserError, match="base model without its head"):
        SafetensorsFolder(folder, build_meta(tiny.llama()))


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickle"):
        SafetensorsFolder(tmp_path, build_meta(tiny.llama()))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds neither"):
        SafetensorsFolder(tmp_path, build_meta(tiny.llama()))


def test_a_damaged_file_is_named(saved):
    _, folder = saved(tiny.llama())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        SafetensorsFolder(folder, build_meta(tiny.llama()))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "link.safetensors"])
def test_files_outside_of_the_folder_are_not_read(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UserError, match="not inside the folder"):
        SafetensorsFolder(folder, build_meta(tiny.llama()))


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "\ud800"], ids=["NUL", "long", "surrogate"])
def test_an_index_of_names_that_no_file_can_have_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UserError, match="as no file can be called"):
        SafetensorsFolder(tmp_path, build_meta(tiny.llama()))


def test_the_links_of_the_hubs_cache_are_followed(saved, tmp_path_factory):
    _, folder = saved(tiny.llama())
    cache = tmp_path_factory.mktemp("models--a--b")
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (folder / "model.safetensors").rename(cache / "blobs" / "beef")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/beef"))
    assert len(SafetensorsFolder(snapshot, build_meta(tiny.llama())).names()) == len(
        dict(build_meta(tiny.llama()).named_parameters())
    )


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="not an index"):
        SafetensorsFolder(tmp_path, build_meta(tiny.llama()))


def test_a_region_of_experts_that_lie_apart_in_the_files() -> None:
    names = [(expert, part) for expert in range(12) for part in range(2)]
    files = {f"{expert}.{part}": torch.randn(3, 5) for expert, part in names}
    pieces = [("w", merged.ExpertPiece(f"{expert}.{part}", expert, part, 2)) for expert, part in sorted(names, key=str)]
    (own,) = merged.merged(pieces).values()
    shapes = {name: (3, 5) for name in files}
    assert merged.shape_of(own, shapes) == (12, 6, 5)
    whole = torch.stack([torch.cat([files[f"{expert}.{part}"] for part in range(2)]) for expert in range(12)])
    for region in ((slice(1, 11), slice(1, 5), slice(2, 4)), (slice(9, 12), slice(0, 2), slice(0, 5))):
        assert torch.equal(merged.read(own, 3, region, lambda name, place: files[name][place]), whole[region])
    assert merged.merged([each for each in pieces if each[1].stored != "11.1"]) == {}  # the last part is missing
    assert merged.shape_of(own, {**shapes, "3.1": (3, 4)}) is None


def test_weights_are_named_by_what_is_in_them(tmp_path: Path) -> None:
    found = []
    for value in (0.0, 0.0, 1.0):
        tensor = torch.zeros(8, 64)
        tensor[4, 0] = value
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        found.append(digest_of_samples(tmp_path))
    assert found[0] == found[1] != found[2]


def sharded(folder: Path, tensors: dict[str, torch.Tensor], *files: list[str]) -> Path:
    """A folder that holds the named tensors in files of their own."""
    folder.mkdir()
    for number, names in enumerate(files):
        save_file({name: tensors[name] for name in names}, folder / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, names in enumerate(files) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def digest(folder: Path) -> str:
    """What nodes agree on."""
    return str(folder_digests(folder)[WHOLE])


def test_digests_see_each_tensor_at_both_ends_and_do_not_depend_on_the_files(tmp_path: Path) -> None:
    large = torch.arange(2**20, dtype=torch.float32)  # 4 MiB: sampled, at its ends too
    tensors = {"large": large, "small": torch.zeros(16_000), "one": torch.zeros(1)}
    plain = digest(sharded(tmp_path / "plain", tensors, ["large", "small"], ["one"]))
    assert digest(sharded(tmp_path / "again", tensors, ["one", "small"], ["large"])) == plain
    for name, at in (("large", 0), ("large", -1), ("small", 7777), ("one", 0)):
        other = {**tensors, name: tensors[name].clone()}
        other[name][at] += 1
        folder = sharded(tmp_path / f"{name}{at}", other, ["large", "small"], ["one"])
        found = difference(folder_digests(folder), folder_digests(tmp_path / "plain"))
        assert digest(folder) != plain and found is not None
        assert found[0] == f"{1 if name == 'one' else 0}.safetensors: {name}"
    typed = sharded(tmp_path / "typed", {**tensors, "one": torch.zeros(1, dtype=torch.int32)}, [*tensors])
    assert digest(typed) != plain  # the same bytes


def test_every_tensor_of_a_file_of_many_is_in_a_digest(tmp_path: Path) -> None:
    tensors = {f"{number:02}": torch.zeros(1) for number in range(70)}
    found = {digest(sharded(tmp_path / "plain", tensors, [*tensors]))}
    for name in tensors:
        save_file({**tensors, name: -torch.zeros(1)}, tmp_path / "plain" / "0.safetensors")
        found.add(digest(tmp_path / "plain"))  # the last byte is another
    assert len(found) == 71


def test_samples_of_a_range_are_of_all_its_parts_and_of_nothing_else(tmp_path: Path) -> None:
    size, samples = 2**26, 24  # 16, and one for each 8 MiB
    apart = size // (samples - 1)
    with (tmp_path / "range").open("w+b") as file:
        file.truncate(size + 9)
        plain = sampled(file.fileno(), 8, 8 + size)
        for at in range(8, 8 + size - apart, apart // 2):
            os.pwrite(file.fileno(), b"1" * apart, at)
            assert sampled(file.fileno(), 8, 8 + size) != plain, at
            os.pwrite(file.fileno(), bytes(apart), at)
        for outside in (7, 8 + size):
            os.pwrite(file.fileno(), b"1", outside)
        assert sampled(file.fileno(), 8, 8 + size) == plain


def test_the_digest_that_checkpoints_hold_stays_as_it_is(tmp_path: Path) -> None:
    save_file({"w": torch.arange(512.0).view(8, 64)}, tmp_path / "model.safetensors")
    assert digest_of_samples(tmp_path) == "4a59b176b6be284c4d94669b363daa26"
    save_file({"w": torch.arange(512.0).view(8, 64) + 1}, tmp_path / "model.safetensors")
    assert digest_of_samples(tmp_path) != "4a59b176b6be284c4d94669b363daa26"


def test_the_program_is_its_packages_and_all_of_its_code() -> None:
    read = program()
    packages = ("fivefold", "torch", "transformers", "safetensors", "tokenizers")
    assert {"the version of python", *(f"the version of {package}" for package in packages)} < read.keys()
    own = read["fivefold's own code"]
    assert {"training/run.py", "core/alike.py", "ops/cpu/cpu_attention.c"} < own.keys()
    assert {".c", ".h", ".py", ".toml", ".yaml"} == {Path(name).suffix for name in own}


def test_a_digest_is_of_a_whole_file_and_named_by_its_path(tmp_path: Path) -> None:
    files = [tmp_path / name / "a.py" for name in ("one", "two")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text("#" * 9999 + str(number))
    found = digests(tmp_path, files)
    assert [*found] == ["one/a.py", "two/a.py"] and len({*found.values()}) == 2


def test_a_difference_is_short_and_that_of_the_value_that_decides() -> None:
    assert difference({"a": {"b": 1}}, {"a": "c"}) == ("a", "{'b': 1}", "c")
    assert difference({"a": {"": 1}}, {"a": {"": 2}}) == ("a", "1", "2")
    name, own, other = difference({"a": "x " * 99}, {"a": "y " * 99}) or ("", "", "")
    assert name == "a" and len(own) <= 80 >= len(other) and own.endswith(" ...") and other.startswith("y ")
