"""State on disk that knows no layout: save under one, go on under any other, export to a Hugging Face folder."""

from fivefold.checkpoint.agreement import agreement, check_agreement
from fivefold.checkpoint.export import Exported, export, find_checkpoint
from fivefold.checkpoint.load import Candidate, Checkpoint, candidates, newest, restore, step_folder, steps
from fivefold.checkpoint.manifest import Damaged, Manifest
from fivefold.checkpoint.save import About, Saver, on_first_rank, save

__all__ = [
    "About",
    "Candidate",
    "Checkpoint",
    "Damaged",
    "Exported",
    "Manifest",
    "Saver",
    "agreement",
    "candidates",
    "check_agreement",
    "export",
    "find_checkpoint",
    "newest",
    "on_first_rank",
    "restore",
    "save",
    "step_folder",
    "steps",
]
