"""The compiled attention of a CPU against the blockwise one in fp64: every rule, shape and type; how it is built."""

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch

from fivefold.core import c_library
from fivefold.core.c_library import compiler
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.interrupts import Stopped
from fivefold.core.system import cpuinfo
from fivefold.models import kernels
from fivefold.models.attention import attention_forward
from fivefold.models.packed import packed_attention
from fivefold.ops import dropout
from fivefold.ops.cpu import cpu_attention
from tests.plain_attention import reference_attention

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

# Relative to the largest value of each result: a few roundings of sums of 257 terms, and of the result's own type.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3}
# Rows, query heads, key/value heads, queries, keys, size of a head: primes, no whole vector, no whole block.
SHAPES = {
    "several blocks": (2, 4, 2, 257, 257, 16),
    "no whole vector": (1, 3, 1, 131, 131, 23),
    "wide heads": (1, 6, 2, 67, 67, 200),
    "five tokens": (3, 2, 2, 5, 5, 64),
    "one query": (2, 2, 1, 1, 77, 32),
    "queries after a cache": (1, 2, 1, 131, 200, 16),
}
RULES = {
    "plain": {},
    "window of 1": {"window": 1},
    "window of 37": {"window": 37},
    "capped": {"softcap": 1.3},
    "capped far off": {"softcap": 3000.0},
    "both": {"window": 50, "softcap": 2.0},
}
PLAIN = kernels.AttentionParams(0.4)


def inputs(rows, heads, shared, queries, keys, size, dtype):
    """q, k, v and a gradient of the output; in memory, heads lie between tokens in some and around them in others."""
    torch.manual_seed(0)
    q = torch.randn(rows, queries, heads, size).transpose(1, 2)
    k = torch.randn(rows, keys, shared, size).transpose(1, 2)
    v, grad = torch.randn(rows, shared, keys, size), torch.randn(rows, heads, queries, size)
    return [tensor.to(dtype) for tensor in (q, k, v, grad)]


def check(q, k, v, grad, rule, ahead=None, roundings=1.0, drops=None):
    exact = [tensor.double() for tensor in (q, k, v, grad)]
    options = {"ahead": ahead, "drops": drops}
    out64, lse64 = kernels.blockwise_forward(*exact[:3], rule, **options)
    grads64 = kernels.blockwise_backward(exact[3], *exact[:3], out64, lse64, rule, **options)
    assert kernels.serving(q, rule, q.shape[2] - 1, **options) == "compiled"
    out, lse = kernels.forward(q, k, v, rule, q.shape[2] - 1, **options)
    grads = kernels.backward(grad, q, k, v, out, lse, rule, q.shape[2] - 1, **options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert (lse.double() - lse64).abs().max() <= 1e-6 * lse64.abs().max()
    for ours, theirs in zip((out, *grads), (out64, *grads64), strict=True):
        # A query that sees itself alone gives q and k no gradient: what is left is the rounding of terms of sqrt(D).
        largest = max(q.shape[3] ** 0.5, theirs.abs().max())
        assert (ours.double() - theirs).abs().max() <= roundings * TOLERANCE[q.dtype] * largest


def test_values_and_gradients(subtests):
    for shape, rule, dtype in product(SHAPES, RULES, TOLERANCE):
        with subtests.test(shape=shape, rule=rule, dtype=dtype):
            check(*inputs(*SHAPES[shape], dtype), kernels.AttentionParams(0.4, **RULES[rule]))


def drops_of(rows, heads, queries, keys, p):
    """Drops of the last queries of rows and of their keys, as views of those of longer rows."""
    tokens = dropout.token_hashes(0, 3, range(5, 5 + rows), keys + 7, torch.device("cpu"))
    heads_H = dropout.feature_hashes(0, "site", torch.arange(heads, dtype=torch.int32))
    whole = dropout.attention_drops(tokens, torch.tensor(9, dtype=torch.int32), heads_H, p)
    return dropout.AttentionDrops(whole.queries[:, keys - queries : keys], whole.keys[:, :keys], p)


def test_weights_that_are_dropped(subtests):
    """The same weights as in fp64; with a probability of 1 all of them. What is kept is larger, and the output of a
    query that sees itself alone is rounded."""
    for shape, rule, dtype, p in product(SHAPES, ("plain", "both"), TOLERANCE, (0.1, 0.75, 1.0)):
        with subtests.test(shape=shape, rule=rule, dtype=dtype, p=p):
            rows, heads, _, queries, keys, _ = SHAPES[shape]
            tensors, drops = inputs(*SHAPES[shape], dtype), drops_of(rows, heads, queries, keys, p)
            check(
                *tensors, kernels.AttentionParams(0.4, **RULES[rule]), drops=drops,
                roundings=2 * max(1, dropout.kept_scale(p)),
            )  # fmt: skip


def test_documents_of_two_rows_that_are_dropped():
    """In one call, as document by document in fp64."""
    edges, drops = torch.tensor([0, 50, 70, 134, 140], dtype=torch.int32), drops_of(2, 4, 70, 70, 0.2)
    arguments = (edges, 0.4, 40, None, None, drops.queries, drops.keys, 0.2)
    results = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in inputs(2, 4, 2, 70, 70, 16, torch.float32)[:3])
        out, lse = packed_attention(q, k, v, *arguments)
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).abs().max() <= 4e-6 * exact.abs().max()


def test_queries_ahead_of_their_keys(subtests):
    """As a rank of a ring meets them: 70 queries, 200 keys before them, or under a window the last of these."""
    for (ahead, window), dtype in product([(200, None), (230, None), (230, 150), (205, 9)], TOLERANCE):
        with subtests.test(ahead=ahead, window=window, dtype=dtype):
            queries = 70 if window != 9 else 3
            tensors, rule = inputs(1, 4, 2, queries, 200, 32, dtype), kernels.AttentionParams(0.3, window)
            check(*tensors, rule, ahead=ahead)
            check(*tensors, rule, ahead=ahead, drops=drops_of(1, 4, queries, 200, 0.2), roundings=2.5)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_head_on_many_threads(threads):
    """Fewer heads than threads: several lanes add up one gradient of q, in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = inputs(1, 1, 1, 1031, 1031, 16, torch.float32)
        check(*tensors, kernels.AttentionParams(0.4))
        q, k, v, grad = tensors
        rule = kernels.AttentionParams(0.4)
        assert cpu_attention._shape(q, k, rule, 0, None).threads == threads
        out, lse = cpu_attention.forward(q, k, v, rule)
        first, second = (cpu_attention.backward(grad, q, k, v, out, lse, rule) for _ in range(2))
        assert all(map(torch.equal, first, second))
    finally:
        torch.set_num_threads(before)


def test_scores_beyond_what_an_exponential_holds():
    """Scores of -300 in the first block of keys, of 90 in the last: e^-390 is 0, and no weight is infinite or NaN."""
    q, k, v, grad = inputs(1, 2, 2, 300, 300, 16, torch.float32)
    q[:, :, :, 0], k[:, :, :200, 0], k[:, :, 200:, 0] = 30.0, -10.0, 3.0
    check(q, k, v, grad, kernels.AttentionParams(1.0), roundings=300.0)


def test_scores_0_to_199_below_the_largest():
    """e^-88 and less have no exponent in fp32: they are 0, not what the bits beside it mean."""
    _, _, v, grad = inputs(1, 1, 1, 1, 200, 1, torch.float32)
    check(torch.ones(1, 1, 1, 1), -torch.arange(200.0).view(1, 1, 200, 1), v, grad, kernels.AttentionParams(1.0))


def test_a_nan_is_not_hidden():
    q, k, v, _ = inputs(1, 1, 1, 9, 9, 16, torch.float32)
    q[0, 0, 4, 3] = float("nan")
    out, _ = cpu_attention.forward(q, k, v, kernels.AttentionParams(0.4))
    assert out[0, 0, 4].isnan().any() and not out[0, 0, [0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("keys", [range(4, 5), range(64, 192)], ids=str)
def test_a_nan_in_some_keys_reaches_what_sees_them(keys, softcap):
    """In the output, and no other; and in every gradient. NaN: one key among others, and a block of keys and more."""
    rule = kernels.AttentionParams(0.4, 150, softcap)
    q, k, v, grad = inputs(1, 2, 1, 300, 300, 16, torch.float32)
    k[0, 0, keys.start : keys.stop, 3] = float("nan")
    sees = [any(keys.start <= key < keys.stop for key in range(max(0, at - 149), at + 1)) for at in range(300)]
    out, lse = cpu_attention.forward(q, k, v, rule)
    dq, dk, dv = cpu_attention.backward(grad, q, k, v, out, lse, rule)
    assert out.isnan().any(-1)[0].tolist() == [sees, sees]
    assert dq[:, :, torch.tensor(sees)].isnan().any(-1).all()  # and where it is times 0, near these
    assert dk.isnan().any(-1)[0, 0, keys.start : keys.stop].all() and dv.isnan().any()


def test_heads_whose_elements_lie_apart():
    """As a product leaves them that computes a transposed result."""
    check(*(tensor.mT.contiguous().mT for tensor in inputs(2, 4, 2, 37, 37, 16, torch.float32)), PLAIN)
    apart = [tensor.mT.contiguous().mT[0].transpose(0, 1) for tensor in inputs(1, 4, 2, 37, 37, 16, torch.float32)]
    edges, rule = torch.tensor([0, 20, 37], dtype=torch.int32), kernels.AttentionParams(0.4)
    results = []
    for q, k, v, grad in (apart, [tensor.contiguous() for tensor in apart]):
        out, lse = kernels.varlen_forward(q, k, v, edges, 20, rule)
        results.append([out, lse, *kernels.varlen_backward(grad, q, k, v, out, lse, edges, 20, rule)])
    assert all(map(torch.equal, *results))


def test_what_an_earlier_call_left_in_memory_does_not_matter():
    """The allocator hands the same memory out again: full of NaN here."""
    tensors = inputs(1, 2, 1, 257, 257, 20, torch.float32)
    q, k, v, grad = (torch.full_like(tensor, float("nan")) for tensor in tensors)
    rule = kernels.AttentionParams(0.4)
    for _ in range(2):  # the second time nothing comes fresh from the system
        out, lse = cpu_attention.forward(q, k, v, rule)
        cpu_attention.backward(grad, q, k, v, out, lse, rule)
    check(*(tensor[:, :, :5] for tensor in tensors), PLAIN)
    check(*tensors, PLAIN)


def test_bf16_rounds_a_tie_to_the_even_neighbour():
    """Of two keys with equal weights the output is the mean of two neighbours."""
    q, k = torch.zeros(1, 1, 2, 2).bfloat16(), torch.ones(1, 1, 2, 2).bfloat16()
    v = torch.tensor([[1.0, 1 + 2**-7], [1 + 2**-7, 1 + 2**-6]]).bfloat16()[None, None]
    out, _ = cpu_attention.forward(q, k, v, kernels.AttentionParams(1.0))
    assert out[0, 0, 1].tolist() == [1.0, 1 + 2**-6]


@pytest.mark.parametrize("size", [1, 257])
def test_narrow_and_wide_heads(size):
    check(*inputs(1, 2, 1, 37, 37, size, torch.float32), PLAIN)


def test_no_rows_no_tokens_and_no_keys():
    """Nothing is divided by their number; a query without keys has no output."""
    rule = kernels.AttentionParams(0.4)
    for rows, queries, keys in ((0, 5, 5), (2, 0, 0), (1, 5, 0)):
        q, k, v, grad = inputs(rows, 4, 2, queries, keys, 16, torch.float32)
        out, lse = cpu_attention.forward(q, k, v, rule)
        dq, dk, dv = cpu_attention.backward(grad, q, k, v, out, lse, rule)
        assert out.isnan().all() and (lse == float("-inf")).all() and not dq.any()
        assert dk.shape == k.shape and dv.shape == v.shape


def test_documents_without_tokens_change_nothing():
    rule = kernels.AttentionParams(0.4)
    q, k, v, grad = (tensor[0].transpose(0, 1) for tensor in inputs(1, 4, 2, 40, 40, 16, torch.float32))
    results = []
    for edges in ([0, 0, 33, 33, 40, 40], [0, 33, 40]):
        bounds = torch.tensor(edges, dtype=torch.int32)
        out, lse = kernels.varlen_forward(q, k, v, bounds, 33, rule)
        results.append([out, lse, *kernels.varlen_backward(grad, q, k, v, out, lse, bounds, 33, rule)])
    assert all(map(torch.equal, *results))


def test_other_users_of_amx_are_not_disturbed():
    """PyTorch's products of bf16 take the same tiles of a CPU that has them, of other shapes."""
    tensors = inputs(1, 4, 2, 257, 257, 64, torch.bfloat16)
    a, b = torch.randn(37, 300).bfloat16(), torch.randn(300, 70).bfloat16()
    alone = a @ b
    for _ in range(3):
        check(*tensors, PLAIN)
        assert torch.equal(a @ b, alone)


def test_tensors_of_two_types_are_a_bug():
    """They would be read as one type, beyond their ends."""
    q, k, v, _ = inputs(1, 2, 1, 9, 9, 16, torch.float32)
    with pytest.raises(AssertionError, match="one type"):
        cpu_attention.forward(q, k, v.bfloat16(), kernels.AttentionParams(0.4))
    with pytest.raises(AssertionError, match="one type"):
        cpu_attention.forward(q.bfloat16(), k.bfloat16(), v, kernels.AttentionParams(0.4))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "rule", [{}, {"sliding_window": 5, "softcap": 0.8, "s_aux": torch.linspace(-3, 3, 6)}], ids=str
)
def test_the_models_attention_takes_documents_of_any_lengths_at_once(dtype, rule, monkeypatch):
    """Documents of 1 to 130 tokens over two rows, their gradients too; nothing is padded."""
    monkeypatch.setattr(kernels, "forward", None)
    monkeypatch.setattr(kernels, "backward", None)
    torch.manual_seed(0)
    edges = torch.tensor([0, 1, 131, 149, 150, 157, 160, 300], dtype=torch.int32)
    q, k, v = (torch.randn(2, 150, heads, 24).to(dtype).transpose(1, 2).requires_grad_() for heads in (6, 2, 2))
    module = type("Attention", (torch.nn.Module,), {"is_causal": True})()
    ours, _ = attention_forward(module, q, k, v, None, scaling=0.4, cu_seqlens=edges, **rule)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    twin = reference_attention(*exact, edges, 0.4, **rule)
    weight = torch.randn_like(twin)
    grads = torch.autograd.grad((ours * weight.to(dtype)).sum(), (q, k, v))
    grads64 = torch.autograd.grad((twin * weight.to(dtype).double()).sum(), exact)
    for mine, theirs in zip((ours, *grads), (twin, *grads64), strict=True):
        assert (mine.double() - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


# ---- how it is built -------------------------------------------------------------------------------------------------


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    cpu_attention._library.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    cpu_attention._library.cache_clear()


def test_without_a_compiler_pytorch_serves(anew, monkeypatch):
    monkeypatch.setattr(c_library, "compiler", lambda: None)
    q = torch.randn(1, 2, 9, 8)
    assert cpu_attention.lacks() == "there is no C compiler"
    assert kernels.serving(q, kernels.AttentionParams(0.3), 8) == "cpu"
    assert kernels.choose("auto", torch.device("cpu")) == ""


def test_a_compiler_that_fails_is_said(anew, monkeypatch):
    def fails(*_):
        raise RunFailed("it does not compile: no OpenMP")

    monkeypatch.setattr(cpu_attention, "compile_library", fails)
    assert "no OpenMP" in cpu_attention.lacks()


@pytest.fixture
def instead(monkeypatch, tmp_path):
    """Puts a script in the place of the compiler; `$out` is the library, `$real` the compiler."""
    real = compiler()

    def put(lines):
        script = tmp_path / "bin" / "cc"
        script.parent.mkdir(exist_ok=True)
        find_out = 'for each in "$@"; do [ "$before" = -o ] && out=$each; before=$each; done'
        script.write_text(f"#!/bin/sh\nreal={real}\n{find_out}\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(cpu_attention, "compiler", lambda: str(script))
        monkeypatch.setattr(c_library, "compiler", lambda: str(script))

    return put


ELSEWHERE = "int attention_tried(void) { __builtin_trap(); }"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (f"echo '{ELSEWHERE}' | $real -shared -fPIC -x c - -o $out", "does not run on this CPU (SIG"),
        ("echo 'int other;' | $real -shared -fPIC -x c - -o $out", "undefined symbol"),
        ("echo rubbish > $out", "cannot be used: OSError"),
        ("exit 3", "ended with 3 and no word"),
        ("cat; exit 1", "ended with 1"),  # nobody is asked
    ],
)
def test_what_an_odd_compiler_makes_is_not_called(anew, instead, lines, said):
    instead(lines)
    assert said in cpu_attention.lacks()


def test_instructions_of_another_machine_are_not_taken(anew, instead):
    """`-march=native` by a compiler that hands its work on: without it the library serves."""
    instead(f"""case "$*" in
        *native*) echo '{ELSEWHERE}' | $real -shared -fPIC -x c - -o $out;;
        *) exec $real "$@";;
    esac""")
    assert not cpu_attention.lacks()
    check(*inputs(*SHAPES["no whole vector"], torch.float32), kernels.AttentionParams(0.4))


@pytest.mark.parametrize("rule", ["plain", "both"])
def test_bf16_without_the_instructions_for_it(anew, monkeypatch, rule):
    """As on a CPU without AMX, where it becomes float. By AMX the results are others."""
    tensors, rule = inputs(*SHAPES["several blocks"], torch.bfloat16), kernels.AttentionParams(0.4, **RULES[rule])
    before = cpu_attention.backward(tensors[3], *tensors[:3], *cpu_attention.forward(*tensors[:3], rule), rule)
    cpu_attention._library.cache_clear()
    if "amx_bf16" in cpuinfo():
        monkeypatch.setattr(cpu_attention, "_OPTIONS", (*cpu_attention._OPTIONS, "-mno-amx-tile", "-mno-amx-bf16"))
    check(*tensors, rule)
    after = cpu_attention.backward(tensors[3], *tensors[:3], *cpu_attention.forward(*tensors[:3], rule), rule)
    assert all(map(torch.equal, before, after)) == ("amx_bf16" not in cpuinfo())


def assert_ends(pid):
    """A process that was sent SIGKILL heeds it when the kernel comes to it."""
    until = time.monotonic() + 10
    with suppress(OSError):
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_compiler_that_hangs_is_ended_with_what_it_started(anew, instead, monkeypatch):
    monkeypatch.setattr(c_library, "LONGEST", 0.3)
    instead(f"sleep 1000 & echo $! > {anew}/sleeper; wait")
    assert "has not compiled cpu_attention.c" in cpu_attention.lacks()
    assert_ends((anew / "sleeper").read_text().strip())


def test_sigterm_while_it_compiles_leaves_neither_compiler_nor_files(anew, instead):
    """A compiler that is killed leaves its temporary files where it was told to put them."""
    instead(f"touch $TMPDIR/ccYeU3.s; sleep 1000 & echo $! > {anew}/new && mv {anew}/new {anew}/sleeper; wait")

    def stop():
        while not (anew / "sleeper").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        cpu_attention.lacks()
    thread.join()
    assert_ends((anew / "sleeper").read_text().strip())
    folders = {each for each in anew.rglob("*") if each.is_dir()}
    assert folders == {anew / "bin", anew / "kernels"} and not [*anew.rglob("*.s")]


def test_a_cache_that_cannot_be_written_is_said(anew, monkeypatch):
    def none(_):
        raise UserError("no folder for compiled code")

    monkeypatch.setattr(c_library, "code_folder", none)
    assert "no folder" in cpu_attention.lacks()


@pytest.mark.full
def test_a_damaged_library_is_built_anew(anew):
    assert not cpu_attention.lacks()
    (library,) = anew.glob("kernels/*/cpu_attention.so")
    library.unlink()  # the loaded one keeps its bytes
    library.write_bytes(b"damaged")
    ask = "from fivefold.ops.cpu import cpu_attention; print(repr(cpu_attention.lacks()))"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert asked.stdout == "''\n" and library.stat().st_size > 1000


def test_another_machine_has_a_library_of_its_own(anew, monkeypatch):
    """A home folder that a laptop shares with a server whose instructions it lacks."""
    for machine in ("one", "another"):
        monkeypatch.setattr(cpu_attention, "_machine", lambda machine=machine: machine)
        cpu_attention._library.cache_clear()
        assert not cpu_attention.lacks()
    assert len(list(anew.glob("kernels/*/cpu_attention.so"))) == 2


def test_each_source_compiler_and_set_of_options_has_a_library_of_its_own(anew, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(c_library, "entry", lambda folder, **_: asked.append(folder) or "none")
    (tmp_path / "other.c").write_text("/* another version */")
    others = (
        (cpu_attention, "_TYPES", cpu_attention._TYPES),
        (cpu_attention, "SOURCE", tmp_path / "other.c"),
        (cpu_attention, "HEADER", tmp_path / "other.c"),
        (cpu_attention, "_OPTIONS", ("-O1",)),
        (c_library, "compiler", lambda: "/another/cc"),
    )
    for module, name, other in others:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            cpu_attention._library.cache_clear()
            assert cpu_attention.lacks() == "none"
    assert len(set(asked)) == len(asked) == 5


def test_a_machine_is_named_by_what_its_cpu_knows(monkeypatch):
    """Not by its clock, which changes."""
    named = []
    for flags, clock in (("fma avx2", 1), ("fma avx2", 2), ("fma avx2 avx512f", 1)):
        text = f"model name\t: a CPU\ncpu MHz\t\t: {clock}\nflags\t\t: {flags}\n"
        monkeypatch.setattr(cpu_attention, "cpuinfo", lambda text=text: text)
        named.append(cpu_attention._machine())
    assert named[0] == named[1] != named[2]


@pytest.mark.parametrize("source", [cpu_attention.SOURCE, cpu_attention.HEADER], ids=lambda path: path.name)
def test_the_source_is_part_of_the_package(source):
    assert source.is_file() and source.parent == Path(cpu_attention.__file__).parent
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"**/*{source.suffix}" in project["tool"]["setuptools"]["package-data"]["fivefold"]


SHORT_OF_MEMORY = r"""
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
static int left; /* allocations until one fails */
static void *scarce(size_t size) {
    if (omp_in_parallel()) abort();
    return --left ? malloc(size) : NULL;
}
#define malloc scarce
#define aligned_alloc(line, size) scarce(size)
#include "cpu_attention.c"
int main(int count, char **arguments) {
    enum { L = 300, D = 8 };
    static float x[9][L * D], lse[L];
    Shape s = {NULL, 1, 1, 1, L, L, D, 0, 0, 1.0f, 0, count > 1, 4};
    Tensor t[9], of_lse = {lse, L, L, 1};
    for (int i = 0; i < 9; i++) t[i] = (Tensor){x[i], L * D, L * D, D};
    for (int missing = 1; missing <= 7; missing++) {
        left = missing;
        if (attention_forward(&s, t, t + 1, t + 2, t + 3, &of_lse) != (missing <= 6)) return 1;
        left = missing;
        if (attention_backward(&s, t + 4, t, t + 1, t + 2, t + 3, &of_lse, t + 5, t + 6, t + 7) != (missing <= 5))
            return 2;
    }
    return 0;
}
"""


@pytest.mark.full
def test_without_memory_it_says_so_and_no_thread_waits(tmp_path):
    """Whichever allocation fails: all are made before the threads part, and none alone can miss at a barrier."""
    (tmp_path / "short.c").write_text(SHORT_OF_MEMORY)
    options = ["-O1", "-fopenmp", f"-I{cpu_attention.SOURCE.parent}"]
    native = ["-march=native"] if "amx_bf16" in cpuinfo() else []
    subprocess.run([compiler(), *native, *options, tmp_path / "short.c", "-o", tmp_path / "short", "-lm"], check=True)
    assert subprocess.run([tmp_path / "short"], timeout=60).returncode == 0
    assert subprocess.run([tmp_path / "short", "in bf16"], timeout=60).returncode == 0


def test_it_can_be_left_out(monkeypatch):
    """`train.attention: fa2` asks for PyTorch's own kernels."""
    monkeypatch.setattr(cpu_attention, "_choice", cpu_attention._Choice())
    q = torch.randn(1, 2, 9, 8)
    assert kernels.choose("fa2", torch.device("cpu")) == "" and not cpu_attention.serves(q)
    assert kernels.choose("auto", torch.device("cpu")) == "compiled" and cpu_attention.serves(q)
    assert not cpu_attention.serves(q.double())
