"""Layout-free state on disk: save under one layout, continue under any other, export to a Hugging Face folder."""

from fivefold.checkpoint.agreement import WARMUP, agreement, check_agreement
from fivefold.checkpoint.export import Exported, export
from fivefold.checkpoint.find import CheckpointRef, Remote, best_step, candidates, find_checkpoint, is_remote, newest
from fivefold.checkpoint.load import Checkpoint, restore
from fivefold.checkpoint.manifest import CorruptCheckpoint, Manifest
from fivefold.checkpoint.save import Metadata, Saver, on_first_rank, save
from fivefold.core.run_folder import step_folder, steps

__all__ = [
    "WARMUP",
    "Checkpoint",
    "CheckpointRef",
    "CorruptCheckpoint",
    "Exported",
    "Manifest",
    "Metadata",
    "Remote",
    "Saver",
    "agreement",
    "best_step",
    "candidates",
    "check_agreement",
    "export",
    "find_checkpoint",
    "is_remote",
    "newest",
    "on_first_rank",
    "restore",
    "save",
    "step_folder",
    "steps",
]
