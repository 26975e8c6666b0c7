"""What lies in the scratch folder of a proof: what is proved, what one process computes, what was found. No torch."""

import json
from pathlib import Path

from fivefold.core.layout import Layout
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.report import VerifyReport, report_of
from fivefold.verification.request import VerifyRequest
from fivefold.verification.results import LayoutResult

SUBJECT = "subject.json"


def report_on(request: VerifyRequest, ran: VerifyRequest, size: int) -> VerifyReport:
    """What was found of the layouts of `ran`. The others of `request` are not for a world of this size."""
    found = {
        name: LayoutResult(name, refused=f"it is for {layout.world} ranks, and this world has {size}")
        for name, layout in request.parsed.items()
    } | read_found(ran)
    each_once = {layout.numerics: layout for layout in ran.parsed.values()}
    about = {
        name: json.loads(reference_file(ran, each).with_suffix(".json").read_text()) for name, each in each_once.items()
    }
    losses = {name: each["losses"] for name, each in about.items()}
    subject = ProofCase.load(ran.folder / SUBJECT).describe() if ran.layouts else ""
    return report_of(list(found.values()), subject, losses)


def reference_file(asked: VerifyRequest, layout: Layout) -> Path:
    """Where the reference lies that computes in the types of `layout`; what is known of it, under the same name with
    `.json`."""
    return (
        asked.folder
        / f"reference-{layout.precision}-{layout.fp8}-{layout.fp8_high_layers}-{layout.state_dtype}.safetensors"
    )


def write_found(asked: VerifyRequest, number: int, found: LayoutResult) -> None:
    """Leave what was found of the layout of this number."""
    (asked.folder / f"found-{number}.json").write_text(json.dumps(found.to_json()))


def read_found(asked: VerifyRequest) -> dict[str, LayoutResult]:
    """What was found of each layout, by name."""
    every = {}
    for number, name in enumerate(asked.layouts):
        file = asked.folder / f"found-{number}.json"
        found = every[name] = LayoutResult.of(json.loads(file.read_text())) if file.exists() else LayoutResult(name)
        broken = sorted(asked.folder.glob(f"broken-{number}-*.txt"), key=lambda path: path.stat().st_mtime_ns)
        if broken:
            found.refused = broken[0].read_text()
    return every
