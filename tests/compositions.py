"""The folds together: every pair, triples and quadruples, each with options that make the other folds matter.

A case is a layout with its options, a family (experts where there is `ep`), and what hides nothing else: accumulation,
packing, ties, what saves memory, clipping that bites, decay, unequal token counts, prime sizes, more than ten experts.
`tests/parallel/test_composition.py` runs two cases of eight ranks each time, and all cases in a campaign.
`benchmarks/compositions.py` runs all of them and writes docs/evidence/compositions.md.
"""

from fivefold.parallel.layout import DEGREES
from tests.parity import Case

ROWS = 16

# layout with options, family, tied embeddings
_PAIRS = (
    ("dp2.shard2+zero1", "qwen2", True),
    ("dp2.cp2+ring", "llama", False),
    ("dp2.tp2+full+offload_optimizer", "gemma2", True),
    ("dp2.pp2+selective", "qwen3", True),
    ("dp2.shard2.ep2+offload", "mixtral", False),
    ("shard2.cp2+zero1+ulysses+selective", "mistral", False),
    ("shard2.tp2+zero2+nosp", "olmo2", False),
    ("shard2.pp2+zero1", "llama", True),
    ("shard2.ep2+zero2+offload_optimizer", "qwen3_moe", False),
    ("cp2.tp2+allgather+offload", "gemma3", True),
    ("cp2.pp2+ring+offload", "smollm3", True),
    ("cp2.ep2+full", "olmoe", False),
    ("tp2.pp2+gpipe", "phi3", False),
    ("tp2.ep2+selective", "qwen3_moe", False),
    ("shard2.pp2.ep2+zero1", "mixtral", False),
)
_TRIPLES = (
    ("dp2.shard2.tp2+zero1", "starcoder2", False),
    ("dp2.shard2.cp2+zero2+ring", "llama", True),
    ("dp2.shard2.pp2+zero2", "gemma2", True),
    ("dp2.cp2.tp2+allgather+nosp", "qwen2", False),
    ("dp2.cp2.pp2+ring", "granite", True),
    ("dp2.tp2.pp2+interleaved+v2", "llama", False),
    ("shard2.cp2.tp2+zero1+ulysses", "nemotron", False),
    ("shard2.cp2.pp2+zero1+allgather+offload_optimizer", "qwen3", False),
    ("shard2.tp2.pp2+zero2+full", "gemma3", True),
    ("cp2.tp2.pp2+ring", "llama", True),
    ("shard2.cp2.ep4+zero1", "olmoe", False),
    ("shard2.tp2.ep4", "qwen3_moe", False),
    ("cp2.tp2.ep4+ring", "mixtral", False),
    ("cp2.tp2.ep2+etp+allgather", "gpt_oss", False),
    ("cp2.pp2.ep2+allgather", "qwen3_moe", False),
    ("tp2.pp2.ep2", "mixtral", False),
    ("dp2.tp2.ep2+full", "olmoe", False),
)
_QUADRUPLES = (
    ("shard2.cp2.tp2.ep4+zero1+ring", "qwen3_moe", False),
    ("shard2.tp2.pp2.ep4+zero1", "mixtral", False),
    ("cp2.tp2.pp2.ep4+allgather", "olmoe", False),
    ("shard2.tp2.pp2.ep2+etp+zero1", "mixtral", False),
    ("shard2.cp2.pp2.ep2+zero1+ring", "qwen3_moe", False),
    ("dp2.tp2.pp2.ep2+nosp", "mixtral", False),
)


def _case(text: str, family: str, tied: bool) -> Case:
    """In fp64, with two rows a micro batch and two micro batches or more."""
    micro = 1 if "pp" in text else 2  # a pipeline wants many micro batches
    changes = (("num_hidden_layers", 4),) if "v2" in text else ()  # else three, which stages do not divide
    return Case(f"{text}+mb{micro}+fp64", family=family, tied=tied, rows=ROWS, overrides=changes)


def folds(case: Case) -> list[str]:
    """The short names of the folds of more than one rank."""
    return [short for short, name in DEGREES.items() if getattr(case.parsed, name) > 1]


PAIRS, TRIPLES, QUADRUPLES = ([_case(*each) for each in group] for group in (_PAIRS, _TRIPLES, _QUADRUPLES))
