"""The cases that a planted fault is looked for in, and those of them that every test run proves: the core.

`benchmarks/fault_matrix.py` plants every fault in every case of its kind, and keeps which of them see it.
"""

import json
from pathlib import Path

from tests.matrix import CASES
from tests.verification.cases import ProvedCase
from tests.verification.faults import FAULTS

MATRIX = Path(__file__).parents[2] / "benchmarks" / "results" / "fault_matrix.json"
CORE = Path(__file__).parent / "core.txt"
SEEN = frozenset("nk")  # letters of the matrix: not a fault that raises, which would not be silent
MOST_OF_FOUR = 4  # cases of the core with four ranks: two processes of tests share two cores

# Cases that combine what faults of different files need, so that few of them see all faults.
COMBINED = """
step shard2+mb2 llama-dpo
step shard2+selective+mb2 llama-kto
step shard2+full+mb2 llama-distill
step shard2+zero2+mb2 gemma2-dpo
step tp2+mb4 llama-kv1-distill
step tp2+selective+mb4 llama-dpo
step tp2+nosp+mb4 llama-kto
step cp2+ring+mb2 mistral-dpo
step cp2+ulysses+mb2 llama-kv1-distill
step cp2+allgather+mb2 gpt2-dpo
step cp3+ring+mb2 mistral-dpo
step dp2+mb2 llama-muon
step pp2+zb+mb2 llama-tied
step pp2+split1-2+full+mb2 gemma3/3
step pp2+mb2 deepseek_v3/4
step shard2.ep2+mb2 deepseek_v3
step shard2.ep2+mb2 gpt_oss/3
step shard2.ep2+mb2 mixtral-capacity
step tp2.ep2+nosp+mb4 mixtral-capacity
step tp2+etp+mb4 gpt_oss/3
step tp2+etp+mb4 mixtral-lora-experts
step shard2.ep2+mb2 mixtral-lora-experts
step cp2.ep2+mb2 mixtral
step shard2+mb2 llama-lora-nf4-dpo
step tp2+nosp+mb4 llama-lora-nf4
step tp2+nosp+mb4 phi3-lora-inner56
step tp2+mb4 phi3-inner56-dpo
step tp2+mb4 qwen3-muon
step tp2+fp8_rowwise deepseek_v3
step cp2+fp8_rowwise llama
step pp2+fp8_rowwise llama
step tp2+fp8_delayed llama
step shard2+mxfp8 llama
step tp2+8bit_states+mb4 llama-muon
step shard2+bf16_states+mb2 llama-muon
step single+8bit_states+mb4 llama
step shard2.tp2+fp8 llama
step shard2.tp2+fp8_delayed llama
step shard2.tp2+mb2 olmo2-kv4-dpo
step tp4+mb4 olmo2
step shard2.tp2.ep4+mb2 mixtral
step shard4.ep2 mixtral
step shard4.ep2+hpz2+hier2+qwz+qgz gpt_oss/3
step dp2 gpt2-pdrop-balanced
load shard2 phi3-inner56
load shard2.tp2 phi3-inner56
load shard2.ep2 deepseek_v3
run shard2 llama
run tp2 llama
run shard2.tp2 llama
run dp2+outer1 llama
""".strip().splitlines()


def all_cases() -> list[ProvedCase]:
    """The combined ones, those that the faults were written down for, and those of the matrix of layouts."""
    own = [ProvedCase(fault.kind, fault.layout, fault.model) for fault in FAULTS.values()]
    return [*{str(case): case for case in [*map(ProvedCase.parse, COMBINED), *own, *CASES]}.values()]


def core() -> list[ProvedCase]:
    """The cases that every test run proves."""
    return [*map(ProvedCase.parse, CORE.read_text(encoding="utf-8").splitlines())]


def read_matrix() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """case -> fault -> what became of it, a letter (see `benchmarks/fault_matrix.py`); case -> the commit that it was
    tried on."""
    if not MATRIX.exists():
        return {}, {}
    kept, lines = json.loads(MATRIX.read_text(encoding="utf-8")), {*map(str, all_cases())}
    rows = {
        line: {name: cell for name, cell in zip(kept["faults"], row, strict=True) if name in FAULTS}
        for line, row in kept["rows"].items()
        if line in lines
    }
    return rows, kept["commits"]
