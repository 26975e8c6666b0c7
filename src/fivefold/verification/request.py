"""The request of `fivefold verify`, and the scratch folder of its proof: the subject, the references and the results.
No torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from fivefold.parallel.layout import Layout
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.report import VerifyReport, report_of
from fivefold.verification.results import LayoutResult

QUICK_STEPS, STEPS = 5, 20
MORE = "fivefold docs howto/verify"


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The layouts to prove, and how. `layouts`: name -> text; `thin`: on a narrow model; `seq_length` None: short rows;
    `scratch`: an empty folder that all ranks see. Plain data: workers read it as JSON.
    """

    config: str  # a run file
    layouts: dict[str, str]
    thin: bool = False
    steps: int = STEPS
    seq_length: int | None = None
    seed: int = 1234
    quiet: bool = False
    scratch: str = ""

    @property
    def parsed(self) -> dict[str, Layout]:
        """The layouts by name."""
        return {name: Layout.parse(text) for name, text in self.layouts.items()}

    @property
    def folder(self) -> Path:
        """`scratch` as a path."""
        return Path(self.scratch)


SUBJECT = "subject.json"


def report_on(request: VerifyRequest, ran: VerifyRequest, size: int) -> VerifyReport:
    """The report of the layouts of `ran`; the others of `request` are listed as not for a world of this size."""
    found = {
        name: LayoutResult(name, refused=f"it is for {layout.world} ranks, and this world has {size}")
        for name, layout in request.parsed.items()
    } | read_found(ran)
    one_of_each = {layout.numerics: layout for layout in ran.parsed.values()}
    about = {
        name: json.loads(reference_file(ran, layout).with_suffix(".json").read_text())
        for name, layout in one_of_each.items()
    }
    losses = {name: facts["losses"] for name, facts in about.items()}
    subject = ProofCase.load(ran.folder / SUBJECT).describe() if ran.layouts else ""
    return report_of(list(found.values()), subject, losses)


def reference_file(asked: VerifyRequest, layout: Layout) -> Path:
    """The file of the reference that computes in the types of `layout`; its metadata has the same name with `.json`."""
    return asked.folder / f"reference-{re.sub('[, ]+', '-', layout.numerics)}.safetensors"


def write_found(asked: VerifyRequest, number: int, found: LayoutResult) -> None:
    """Write the results of layout `number`."""
    (asked.folder / f"found-{number}.json").write_text(json.dumps(found.to_json()))


def read_found(asked: VerifyRequest) -> dict[str, LayoutResult]:
    """Read the results of each layout, by name."""
    every = {}
    for number, name in enumerate(asked.layouts):
        file = asked.folder / f"found-{number}.json"
        found = every[name] = LayoutResult.of(json.loads(file.read_text())) if file.exists() else LayoutResult(name)
        broken = sorted(asked.folder.glob(f"broken-{number}-*.txt"), key=lambda path: path.stat().st_mtime_ns)
        if broken:
            found.refused = broken[0].read_text()
    return every
