"""Compile the kernels of `ops/gpu_attention.py` for the chip that the stand-in shows, and print what ptxas says of each
as a line of JSON: `python -m tests.rehearsed.compiled_attention`, in the environment of the stand-in."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from fivefold.ops import gpu_attention, gpu_attention_kernels
from fivefold.ops.cpu_attention import AttentionParams

SIZES = (64, 128, 256)
# (rows, queries, keys, offset, bounds, window): documents of any lengths, blocks between ranks of any lengths.
CALLS = (
    (1, 8192, 8192, 0, [0, 8192], None), (1, 8192, 8192, 0, [0, 1, 38, 8192], 1),
    (1, 8192, 8192, 0, [0, 16, 8192], 4096),
    (1, 37, 100, 129, None, 300), (2, 64, 64, 64, None, 300), (1, 4095, 4096, 4096, None, None),
)  # fmt: skip


class Launched:
    """In place of a kernel: it is launched, and what was compiled for that is kept."""

    def __init__(self, kernel: Any, kept: list[Any]) -> None:
        self.kernel, self.kept = kernel, kept

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            self.kept.append(self.kernel[grid](*given, **options))

        return launch


def main() -> None:
    kept: dict[str, list[Any]] = {name: [] for name in gpu_attention.TILES}
    for name, of_name in kept.items():
        setattr(gpu_attention_kernels, name, Launched(getattr(gpu_attention_kernels, name), of_name))
    for size in SIZES:
        for call in CALLS:
            attend(size, *call)
        for name, of_name in kept.items():
            programs = {id(each): each for each in of_name}
            for each in programs.values():
                print(
                    json.dumps({"kernel": name, "size": size, "programs": len(programs), **said_of(each)}), flush=True
                )
            of_name.clear()


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


def said_of(compiled: Any) -> dict[str, Any]:
    """Registers of a thread, bytes that it spills and that a block shares; `inside`: spills of the loops that
    multiply."""
    target = "a" if compiled.metadata.target.arch == 90 else ""
    tool = Path(triton.knobs.nvidia.ptxas.path)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(compiled.asm["ptx"])
        command = [tool, "-v", f"--gpu-name=sm_{compiled.metadata.target.arch}{target}", source, "-o", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listing = subprocess.run([tool.with_name("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True)
    registers, stores = (
        int(found[1]) if (found := re.search(pattern, said)) else -1
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    inside = sum(len(re.findall(r"\b(?:LDL|STL)\b", loop)) for loop in loops(listing.stdout.splitlines()))
    return {"registers": registers, "spilled": stores, "inside": inside, "shared": compiled.metadata.shared}


def loops(lines: list[str]) -> Iterator[str]:
    """The innermost loops that multiply matrices."""
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\.L_x_\d+):", line))}
    jumps = ((at, re.search(r"BRA\b.*?(\.L_x_\d+)", line)) for at, line in enumerate(lines))
    spans = [(labels[found[1]], at) for at, found in jumps if found and labels.get(found[1], at) < at]
    for begin, end in spans:
        if not any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in spans):
            text = "\n".join(lines[begin:end])
            if "MMA" in text:
                yield text


if __name__ == "__main__":
    main()
