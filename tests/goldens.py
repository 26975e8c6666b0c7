"""What the program says and computes now, to be compared after a change that should change nothing.

    python -m tests.goldens write FOLDER      at the commit before
    python -m tests.goldens compare FOLDER    after the change: names what differs; exits with 1 where something does
    python -m tests.goldens show KEY          the text behind one line, to be compared by `diff`

FOLDER holds a line for each fact (a name and a digest of its text) and a checkpoint of each run. Bits are those of this
machine and these packages: a folder is written and compared on one machine, and is not committed. Some ten minutes.

    keys        every key of the run file, with type, default and description
    legality    what is said of 2,000 random layouts
    plan        collectives, bytes, shards and edits of some 370 layouts, of a first, a middle and a last pipeline rank
    estimate    memory and time of these layouts
    proof       what the core of the proofs compares, and whether it is right
    run         losses and final bits of 20 steps under six layouts; `compare` also goes on from the old checkpoints
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fivefold.checkpoint import Checkpoint, step_folder
from fivefold.config import keys
from fivefold.core.errors import Violation
from fivefold.parallel.features import calls, edits
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.planner.estimate import PricedStep
from fivefold.planner.price import PriceList
from tests.planner.test_search import WORKLOAD, sample
from tests.test_legality import a_case
from tests.training.bodies import MODEL, column, run_dir, run_file, train
from tests.verification.cases import ProvedCase
from tests.verification.core import core
from tests.verification.mutation import prove

LINES = "goldens.json"
LAYOUTS = ("single", "shard2", "tp2", "pp2", "cp2", "shard2.ep2")
STEPS = 20
Facts = Iterator[tuple[str, Callable[[], str]]]


def main(arguments: list[str]) -> int:
    """The exit code."""
    what, where = arguments
    if what == "show":
        print(dict(facts(Path(tempfile.mkdtemp())))[where]())
        return 0
    folder = Path(where)
    if what == "write":
        folder.mkdir(parents=True)
        (folder / LINES).write_text(json.dumps(digests(folder), indent=0) + "\n", encoding="utf-8")
        return 0
    before = json.loads((folder / LINES).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as place:
        after = digests(Path(place)) | resumed(folder, Path(place))
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    print("\n".join(f"differs: {name}" for name in differing) or f"all {len(before):,} are as before")
    return int(bool(differing))


def digests(folder: Path) -> dict[str, str]:
    """A digest of each fact, by name; runs are left in `folder`."""
    return {name: blake2b(text().encode(), digest_size=8).hexdigest() for name, text in facts(folder)}


def facts(folder: Path) -> Facts:
    """Each fact, by name."""
    yield "keys", lambda: "\n".join(map(str, keys()))
    yield from legality()
    yield from plans()
    yield from proofs(folder)
    for layout in LAYOUTS:
        yield f"run {layout}", partial(run, folder / layout, layout)


def legality() -> Facts:
    """What is wrong with random layouts, in words."""
    draw = random.Random(7)
    for number in range(2000):
        layout, limits, world, batch = a_case(draw)
        yield f"legality {number}", partial(_said, violations(layout, limits, world=world, batch=batch))


def _said(found: Iterable[Violation]) -> str:
    return "\n".join(map(str, found))


def plans() -> Facts:
    """Of the layouts on which the planner is tested."""
    for number, (prices, layout) in enumerate(sample()):
        step = PricedStep(prices, layout, WORKLOAD)
        for rank in sorted({0, layout.pp // 2, layout.pp - 1}):
            name = f"plan {number} {prices.cluster} {layout} stage {rank}"
            yield name, partial(plan_text, prices, step, layout, rank)
        yield f"estimate {number} {prices.cluster} {layout}", partial(_estimate, step)


def plan_text(prices: PriceList, step: PricedStep, layout: Layout, pp_rank: int) -> str:
    """Collectives, bytes, shards and edits of a rank."""
    plan = lower(prices.facts, layout, pp_rank * (layout.world // layout.pp))
    shape = plan.step_shape(layout.micro_batch_size, layout.padded(WORKLOAD.seq_length), step.micro_batches)
    shape = replace(shape, compiled=prices.traits.compiled)
    regions = [(name, plan.placement.regions(name)) for name in plan.facts.parameters]
    parts = [
        *map(str, calls(plan, shape)),
        str(step_bytes(plan, shape)),
        *map(str, regions),
        *map(str, edits(plan)),
    ]
    return "\n".join(parts)


def _estimate(step: PricedStep) -> str:
    return str(step.estimate())


def proofs(folder: Path) -> Facts:
    """What is compared, and whether it is right; not how much it is off, which a machine decides."""
    for case in core():
        yield f"proof {case}", partial(_proof, case, folder / "proofs")


def _proof(case: ProvedCase, folder: Path) -> str:
    found = prove(case.kind, case.model, case.layout, folder, steps=2).found
    return "\n".join([found.refused or "", *(f"{row.what} {row.ok}" for row in found.rows)])


def run(folder: Path, layout: str) -> str:
    """Losses of each step, and the bits at the end."""
    tree = tree_of(folder, layout, STEPS)
    ran = train(tree, Layout.parse(layout).world)
    if ran.error:
        raise ran.error
    return json.dumps(column(tree, "train/loss")) + state(tree)


def resumed(old: Path, place: Path) -> Mapping[str, str]:
    """Checkpoints of before must load: one more step from each has the loss of one more step from those of now."""
    found = {}
    for layout in LAYOUTS:
        losses = []
        for folder in (old / layout, place / layout):
            again = place / f"again-{layout.replace('.', '-')}"
            shutil.rmtree(again, ignore_errors=True)
            shutil.copytree(folder, again)
            tree = tree_of(again, layout, STEPS + 1)
            ran = train(tree, Layout.parse(layout).world)
            losses.append(str(ran.error) if ran.error else json.dumps(column(tree, "train/loss")))
        if losses[0] != losses[1]:
            found[f"resume {layout}: {losses}"] = ""
    return found


def tree_of(folder: Path, layout: str, steps: int) -> dict[str, Any]:
    """A run file, of a mixtral under experts. The model and its text lie where they always lie: a run that goes on asks
    for the same."""
    parsed, given = Layout.parse(layout), Path(tempfile.gettempdir()) / "fivefold-goldens" / layout
    given.mkdir(parents=True, exist_ok=True)
    if parsed.ep > 1 and not (given / "config.json").exists():
        run_file(given)
        experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
        (given / "config.json").write_text(json.dumps(MODEL | experts))
    sizes = {f"layout__{name}": getattr(parsed, name) for name in ("dp_shard", "tp", "pp", "cp", "ep")}
    changes = {"train__max_steps": steps, "scheduler__name": "constant", "checkpoint__every": STEPS, **sizes}
    return run_file(given, run__dir=str(folder), **changes)


def state(tree: Mapping[str, Any]) -> str:
    """A digest of the weights and moments of the last checkpoint."""
    checkpoint = Checkpoint.open(run_dir(tree) / "checkpoints" / step_folder(STEPS))
    digest = blake2b()
    for kind in checkpoint.kinds:
        source = checkpoint.source(kind)
        for name in source.ordered:
            digest.update(f"{kind} {name}".encode() + source.whole(name).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
