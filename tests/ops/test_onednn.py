"""fp32 products by oneDNN: the results, the shapes and errors of `mm` and `addmm` stay; in a process of its own, since
they are replaced for the whole process."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from fivefold import torch_internals
from fivefold.ops.cpu import tuning


def in_a_process(code: str) -> str:
    start = "import torch\nfrom fivefold.ops.cpu.tuning import multiply_by_onednn\nmultiply_by_onednn()\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", start + textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_products_are_those_of_fp64() -> None:
    """Above and below the size from which oneDNN serves; transposed, strided, expanded and empty operands; types other
    than fp32; gradients through a linear with and without a bias."""
    in_a_process("""
        from torch import nn
        from torch.nn import functional as F
        torch.manual_seed(0)

        def operands(m, k, n):
            yield torch.randn(m, k), torch.randn(k, n)
            yield torch.randn(k, m).t(), torch.randn(n, k).t()
            yield torch.randn(m, 2 * k)[:, ::2], torch.randn(3 * k, n + 1)[::3, 1:]
            yield torch.randn(m, 1).expand(m, k), torch.randn(1, n).expand(k, n)

        def close(ours, exact):
            assert ours.shape == exact.shape and (ours.double() - exact).abs().max() <= 5e-5 * exact.abs().max()

        for sizes in ((131, 101, 97), (3, 5, 7), (1, 2048, 1031), (1031, 1, 1031)):
            for a, b in operands(*sizes):
                bias = torch.randn(sizes[2])
                close(a @ b, a.double() @ b.double())
                out = torch.empty(0)
                assert torch.mm(a, b, out=out) is out
                close(out, a.double() @ b.double())
                close(torch.mm(a, b, out=torch.empty(sizes[2], sizes[0]).t()), a.double() @ b.double())
                close(torch.addmm(bias, a, b), torch.addmm(bias.double(), a.double(), b.double()))
                for beta, alpha in ((0.5, 3), (0.5, 1), (1, 3)):
                    exact = beta * bias.double() + alpha * (a.double() @ b.double())
                    close(torch.addmm(bias, a, b, beta=beta, alpha=alpha), exact)
                for apart in (bias[:1].expand(sizes[2]), torch.randn(2 * sizes[2])[::2]):
                    close(torch.addmm(apart, a, b), apart.double() + a.double() @ b.double())
                full = torch.randn(sizes[0], sizes[2])
                close(torch.addmm(full, a, b), full.double() + a.double() @ b.double())
        ones = torch.ones(200, 200, dtype=torch.int64)
        assert torch.equal(ones @ ones, 200 * ones)
        assert (torch.ones(0, 5) @ torch.ones(5, 3)).shape == (0, 3) and not (torch.ones(4, 0) @ torch.ones(0, 3)).any()
        assert (torch.randn(200, 200).bfloat16() @ torch.randn(200, 200).bfloat16()).dtype is torch.bfloat16
        for bias in (False, True):
            linear = nn.Linear(211, 307, bias=bias)
            twin = nn.Linear(211, 307, bias=bias).double()
            twin.load_state_dict(linear.state_dict())
            x = torch.randn(3, 41, 211, requires_grad=True)
            y = x.detach().double().requires_grad_()
            linear(x).square().sum().backward()
            twin(y).square().sum().backward()
            for ours, theirs in zip((x, *linear.parameters()), (y, *twin.parameters()), strict=True):
                close(ours.grad, theirs.grad)
    """)


@pytest.mark.full
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_wrong_operands_are_refused_and_nan_stays() -> None:
    in_a_process("""
        for a, b in ((torch.ones(200, 300), torch.ones(200, 300)), (torch.ones(300), torch.ones(300, 300)),
                     (torch.ones(200, 300), torch.ones(300, 200).double())):
            try:
                torch.mm(a, b)
            except RuntimeError:
                continue
            raise SystemExit("taken")
        a = torch.ones(200, 200)
        for dtype in (torch.float64, torch.float16, torch.int64):  # nothing is rounded in silence
            try:
                torch.mm(a, a, out=torch.empty(200, 200, dtype=dtype))
            except RuntimeError as error:
                assert "Expected out tensor to have dtype float" in str(error)
                continue
            raise SystemExit("taken")
        try:
            torch.mm(a, a, out=torch.empty(3, 3))
        except UserWarning as warning:
            assert "was resized" in str(warning)
        a[3, 5] = float("nan")
        assert (a @ torch.ones(200, 200)).isnan().sum() == 200
    """)


def test_it_serves_where_mkl_takes_half_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AMD CPU with AVX-512 that is executed whole; not Zen 4, nor one of Intel, nor one without AVX-512."""
    for maker, family, capability, is_slow in (
        ("AuthenticAMD", 26, "AVX512", True),
        ("AuthenticAMD", 25, "AVX512", False),
        ("GenuineIntel", 6, "AVX512", False),
        ("AuthenticAMD", 26, "AVX2", False),
    ):
        said = f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\n"
        monkeypatch.setattr(tuning, "cpuinfo", lambda said=said: said)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        assert tuning.mkl_is_slow() is is_slow


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_other_operators_that_were_replaced_before_do_not_keep_onednn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives are carried over shared memory by the same means, and may be so first."""
    replaced: list[str] = []
    monkeypatch.setattr(torch_internals, "_overrides", {"c10d": object()})
    library = SimpleNamespace(impl=lambda name, *_: replaced.append(name))
    monkeypatch.setattr(torch.library, "Library", lambda *_: library)
    tuning.multiply_by_onednn()
    assert replaced == ["mm", "mm.out", "addmm"]
