"""The one matrix: every pair of options meets in a case, on at most four ranks.

Each is the proof of a step (`tests/verification/cases.py`) in one of `MODELS`, of three layers, which stages do not
divide, or of four; its loss is computed in three chunks or at once. Cases of one model stand together: each layout
loads what the one before it saved.

`python -m tests.matrix` prints the lines: those that are there, and more for pairs that no line has yet, such as those
of a new schedule. A campaign test proves that they cover all pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from fivefold.core.schedule import SCHEDULES
from fivefold.parallel.layout import DEGREES, Layout
from tests.allpairs import Choice, Pair, all_pairs, pairs_of, reachable
from tests.verification.cases import ProvedCase, model_of

ROWS, RANKS = 8, 4

# Every pair of ties, key/value heads, optimizer and experts, each in a family of its own.
NAMES = """
llama qwen3-kv1-tied-muon gemma2-kv4-tied olmo2-kv4-muon phi3-kv4 granite-kv1 mistral-tied-muon
mixtral qwen3_moe-kv1-tied-muon gpt_oss-kv4-muon olmoe-tied deepseek_v3-kv4
"""
MODELS = [*map(model_of, NAMES.split())]
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3")

OPTIONS: dict[str, Any] = {
    "dp": (1, 2), "shard": (1, 2, 4), "cp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2, 4), "ep": (1, 2, 4),
    "schedule": ("", *SCHEDULES),
    "method": ("", "ring", "allgather", "ulysses", "2x2"),
    "experts": (False, True),
    "etp": (False, True),
    "zero": (1, 2, 3),
    "sequence_parallel": (True, False),
    "full": (False, True),
    "chunks": (False, True),
    "kv_heads": (1, 2, 4),
    "tied": (False, True),
    "optimizer": ("adamw", "muon"),
    "several": (True, False),  # micro batches: two instead of one, in a pipeline four instead of two
}  # fmt: skip
_KINDS = {(m.family in EXPERTS, m.kv_heads, m.tied, m.optimizer): m for m in MODELS}
_OF_MODEL = ("experts", "kv_heads", "tied", "optimizer")
# (what is known, the rule): what is refused, and options that do nothing, are not varied.
_RULES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (_OF_MODEL, lambda *kind: kind in _KINDS),
    (("pp", "schedule"), lambda pp, schedule: (pp > 1) == bool(schedule)),
    (("pp", "schedule"), lambda pp, schedule: pp < 4 or schedule in ("1f1b", "gpipe")),  # of four layers
    (("schedule", "several"), lambda schedule, several: several or schedule != "dualpipev"),
    (("cp", "method"), lambda cp, method: (cp > 1) == bool(method) and (method != "2x2" or cp == 4)),
    (("ep", "experts"), lambda ep, experts: experts or ep == 1),
    (("etp", "experts"), lambda etp, experts: experts or not etp),
    (("etp", "tp"), lambda etp, tp: tp > 1 or not etp),
    (("sequence_parallel", "tp"), lambda parallel, tp: tp > 1 or parallel),
    (("ep", "shard", "cp", "tp", "etp"), lambda ep, shard, cp, tp, etp: shard * cp * (1 if etp else tp) % ep == 0),
    (("dp", "shard", "cp", "zero"), lambda dp, shard, cp, zero: dp * shard * cp > 1 or zero == 3),
)  # fmt: skip


def is_legal(choice: Choice) -> bool:
    """Of a choice, or of its beginning."""
    if prod(choice.get(name, 1) for name in ("dp", "shard", "cp", "tp", "pp")) > RANKS:
        return False
    return all(rule(*(choice[n] for n in names)) for names, rule in _RULES if all(n in choice for n in names))


def needed() -> set[Pair]:
    """Every pair that can be; but for the schedule of a pipeline and the method of attention, neither of which has a
    line that knows of the other."""
    return {pair for pair in reachable(OPTIONS, is_legal) if {name for name, _ in pair} != {"schedule", "method"}}


def choice_of(case: ProvedCase) -> Choice:
    """The value that a case has of every option."""
    layout, model = Layout.parse(case.layout), case.model
    degrees = {short: getattr(layout, name) for short, name in DEGREES.items()}
    return degrees | {
        "schedule": layout.pp_schedule if layout.pp > 1 else "",
        "method": layout.cp_method if layout.cp > 1 else "",
        "experts": model.family in EXPERTS, "etp": layout.expert_tp, "zero": layout.zero,
        "sequence_parallel": layout.sequence_parallel, "full": layout.recompute == "full", "chunks": model.is_chunked,
        "kv_heads": model.kv_heads, "tied": model.tied, "optimizer": model.optimizer,
        "several": layout.accumulation(ROWS) > 1 + (layout.pp > 1),
    }  # fmt: skip


def case_of(choice: Choice) -> ProvedCase:
    """The case that has these values."""
    data, schedule = choice["dp"] * choice["shard"], choice["schedule"]
    piped = choice["pp"] > 1
    micro = ROWS // data // (1 + piped) // (1 + choice["several"])
    text = ".".join(f"{short}{choice[short]}" for short in DEGREES if choice[short] > 1) or "single"
    words = {
        f"zero{choice['zero']}": choice["zero"] != 3, schedule: schedule not in ("", "1f1b"),
        "v2": schedule == "interleaved", choice["method"]: choice["method"], f"mb{micro}": micro > 1,
        "full": choice["full"], "nosp": not choice["sequence_parallel"], "etp": choice["etp"],
    }  # fmt: skip
    layout = str(Layout.parse("+".join([text, *(word for word, is_on in words.items() if is_on)])))
    four = choice["pp"] == 4 or schedule in ("interleaved", "zbv", "dualpipev")
    model = _KINDS[tuple(choice[n] for n in _OF_MODEL)]
    deep = model_of(f"{model.family}/{4 if four else 3}")
    return ProvedCase("step", layout, replace(model, changes=deep.changes, is_chunked=choice["chunks"]))


def write(kept: Sequence[ProvedCase] = ()) -> Iterator[str]:
    """The lines of the cases `kept`, and of those that the pairs need that these lack, with the seed of the fewest."""
    missing = needed() - {pair for case in kept for pair in pairs_of(choice_of(case))}
    found = min((all_pairs(OPTIONS, legal=is_legal, needed=missing, seed=seed) for seed in range(9)), key=len)
    order = [model.family for model in MODELS]
    cases = [*kept, *map(case_of, found)]
    yield from map(str, sorted(cases, key=lambda case: (order.index(case.model.family), case.model.changes)))


CASES: list[ProvedCase] = [ProvedCase.parse(line) for line in """
step cp4+zero1+ring+mb8 llama/3-unchunked
step cp4+zero2+2x2+mb4 qwen3/3-kv1-tied-muon
step dp2.pp2+zero2+zb+mb2 qwen3/3-kv1-tied-muon-unchunked
step tp4+mb8+full+nosp qwen3/3-kv1-tied-muon
step shard2.cp2+zero1+ulysses+mb2+full qwen3/3-kv1-tied-muon-unchunked
step dp2.pp2+zero2+dualpipev qwen3/4-kv1-tied-muon-unchunked
step shard4+zero2+full gemma2/3-kv4-tied-unchunked
step dp2.pp2+zero2+zbv+mb2 gemma2/4-kv4-tied-unchunked
step cp2.tp2+zero2+allgather+mb8+nosp phi3/3-kv4
step dp2.cp2+ring+mb4 granite/3-kv1-unchunked
step pp4+mb2+full granite/4-kv1
step cp2.pp2+zero1+zbv+ulysses+mb2+full granite/4-kv1-unchunked
step shard2.pp2+zero2+gpipe+mb2 mistral/3-tied-muon-unchunked
step dp2.pp2+zero1+interleaved+v2+full mistral/4-tied-muon
step cp2.pp2+zb+ulysses+mb2+full mixtral/3
step cp4.ep2+zero1+2x2+mb8+full mixtral/3-unchunked
step shard4.ep2+full mixtral/3
step dp2.tp2.ep2+mb2+nosp mixtral/3
step cp2.pp2+zero2+ulysses+mb2+full mixtral/3
step shard2.cp2.ep4+zero1+ring+mb4+full mixtral/3-unchunked
step tp2.pp2+dualpipev+mb2+full+nosp+etp mixtral/4
step shard2.pp2+zero1+dualpipev+full mixtral/4
step shard2.tp2.ep2+zero1+mb4+nosp+etp qwen3_moe/3-kv1-tied-muon-unchunked
step cp2.pp2.ep2+zero1+gpipe+allgather+mb2+full qwen3_moe/3-kv1-tied-muon
step shard4.ep4+zero1+mb2 qwen3_moe/3-kv1-tied-muon-unchunked
step cp4.ep4+ulysses+mb8 qwen3_moe/3-kv1-tied-muon
step dp2.pp2+zero2+gpipe+mb2 qwen3_moe/3-kv1-tied-muon
step dp2.tp2+zero1+mb4+full+etp qwen3_moe/3-kv1-tied-muon-unchunked
step cp2.tp2+zero2+allgather+mb4+full+etp qwen3_moe/3-kv1-tied-muon
step dp2.cp2.ep2+ulysses+mb4 qwen3_moe/3-kv1-tied-muon
step tp2.pp2+interleaved+v2+mb2+nosp+etp qwen3_moe/4-kv1-tied-muon-unchunked
step cp2.tp2.ep4+zero2+ring+mb4+full+nosp gpt_oss/3-kv4-muon
step shard2.pp2.ep2+zero1+full gpt_oss/3-kv4-muon
step shard2.pp2.ep2+zero1+zb+mb2+full gpt_oss/3-kv4-muon
step tp2.pp2+zb+mb4+full+nosp+etp gpt_oss/3-kv4-muon-unchunked
step cp2.tp2.ep2+zero2+ulysses+mb8+nosp+etp gpt_oss/3-kv4-muon-unchunked
step pp4+gpipe+mb4 gpt_oss/4-kv4-muon
step shard2.pp2.ep2+zero2+zbv+full gpt_oss/4-kv4-muon
step cp2.pp2.ep2+zero1+dualpipev+ring+mb2 gpt_oss/4-kv4-muon-unchunked
step cp2.pp2.ep2+zero2+interleaved+v2+ulysses+mb4 gpt_oss/4-kv4-muon-unchunked
step shard2.cp2.ep4+allgather+mb2 olmoe/3-tied-unchunked
step dp2.pp2+zero2+mb2 olmoe/3-tied-unchunked
step tp4.ep2+mb4+nosp olmoe/3-tied
step cp2.tp2.ep2+zero2+ring+mb8+full+etp olmoe/3-tied-unchunked
step tp2.pp2+mb4+nosp+etp olmoe/3-tied-unchunked
step tp2.pp2+gpipe+mb4+full+nosp+etp olmoe/3-tied
step dp2.shard2.ep2+zero2+full olmoe/3-tied
step tp2.pp2+zbv+mb2+full+nosp+etp olmoe/4-tied-unchunked
step pp4+gpipe+mb2 olmoe/4-tied-unchunked
step shard2.pp2.ep2+zero2+interleaved+v2+mb2+full olmoe/4-tied
step tp4+mb8+full+etp deepseek_v3/3-kv4-unchunked
step cp4.ep4+2x2+mb8+full deepseek_v3/3-kv4
step dp2.cp2+zero2+allgather+mb2+full deepseek_v3/3-kv4
step tp4.ep4+mb8 deepseek_v3/3-kv4-unchunked
step cp4+zero2+allgather+mb4 deepseek_v3/3-kv4-unchunked
""".strip().splitlines()]  # fmt: skip

if __name__ == "__main__":
    print(*write(CASES), sep="\n")
