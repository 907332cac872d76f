"""step_folders: where the checkpoints of a run lie, one folder a step. Needs no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

KEPT = 2
"""How many complete checkpoints are kept: the newest."""


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint at that step."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of which there is a folder, whether or not it is complete."""
    return [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]


def remove_before(folder: Path, step: int) -> None:
    """Remove the checkpoints of all earlier steps."""
    for earlier in steps_in(folder):
        if earlier < step:
            shutil.rmtree(step_folder(folder, earlier), ignore_errors=True)
