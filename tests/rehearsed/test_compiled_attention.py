"""FlexAttention under soft caps and windows, compiled for an H100 and an A100 without either.

Run as a module in the environment of the stand-in, it compiles and launches, and prints how often Dynamo compiled.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fivefold.hardware.cluster import Cluster
from fivefold.ops import gpu_attention
from fivefold.ops.blockwise_attention import AttentionParams
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.stand_in import lacking
from fivefold.torch_internals import compiles

SIZES = (64, 128, 256)
# (rows, queries, keys, offset, bounds, window)
DOCUMENTS = (
    (1, 8192, 8192, 0, [0, 8192], None),
    (1, 8192, 8192, 0, [0, 1, 38, 8192], 1),
    (1, 8192, 8192, 0, [0, 16, 8192], 4096),
)
BETWEEN_RANKS = (
    (1, 37, 100, 129, None, 300),
    (2, 64, 64, 64, None, 300),
    (1, 4095, 4096, 4096, None, None),
    (1, 511, 2048, 2048, None, 4096),
    (1, 1023, 2050, 2048, None, 4096),
)
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(lacking()), reason="it needs a CUDA build of torch, and a C compiler"),
]


@pytest.mark.parametrize("chip", ["H100", "A100"])
def test_it_compiles_for_heads_of_any_size(chip: str, tmp_path: Path) -> None:
    """Fused, and within the chip's shared memory: Triton refuses to load what asks for more. Documents and windows
    compile nothing anew, and lengths do so a few times."""
    environment = stand_in.environment(Cluster.parse(f"1x{chip}").chip, 1, base=os.environ)
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCH_LOGS": "output_code"}
    command = [sys.executable, "-m", "tests.rehearsed.test_compiled_attention"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *of_documents, of_lengths = map(int, done.stdout.split())
    assert of_documents[0] == 3  # forward, and in backward forward again with its gradient, and the shares
    assert of_documents[-1] <= 3 * len(SIZES) and of_lengths <= of_documents[-1] + 21
    assert set(re.findall(r"def triton_tem_fused_\w*(flex_attention(?:_backward)?)_", done.stderr)) == {
        "flex_attention",
        "flex_attention_backward",
    }


def attend(
    size: int, rows: int, queries: int, keys: int, offset: int, bounds: list[int] | None, window: int | None
) -> None:
    """Forward and backward of one layer, of 16 query heads that share 8."""
    q, k, v = (
        torch.empty(rows, tokens, heads, size, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for tokens, heads in ((queries, 16), (keys, 8), (keys, 8))
    )
    edges = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    rule, where = AttentionParams(size**-0.5, window, 50.0), {"offset": offset, "cu_seqlens": edges}
    out, lse = gpu_attention.forward(q, k, v, rule, **where)
    gpu_attention.backward(out, q, k, v, out, lse, rule, **where)


def main() -> None:
    compiles()  # records them from here on
    for size in SIZES:
        for call in DOCUMENTS:
            attend(size, *call)
        print(len(compiles()), flush=True)
    for call in BETWEEN_RANKS:
        attend(SIZES[1], *call)
    print(len(compiles()), flush=True)


if __name__ == "__main__":
    main()
