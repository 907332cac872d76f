"""step_folders: where the checkpoints of a run lie, one folder a step. Needs no torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

KEPT = 2
"""How many complete checkpoints are kept: the newest."""

ASIDE = "set-aside-"
"""Folders with steps of earlier attempts begin with this.

The step follows at which a later one began, and the mark of the attempt that saved them.
"""


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint at that step."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of which there is a folder, whether or not it is complete."""
    return [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]


def records_in(folder: Path, step: int, whose: str = "*") -> list[Path]:
    """The records of nodes at a step; none if another node removes the step at this moment."""
    try:
        return list(step_folder(folder, step).glob(f"{whose}.json"))
    except FileNotFoundError:
        return []


def aside_folder(folder: Path, begin: int, attempt: str) -> Path:
    """Where that lies which an attempt saved after the step at which a later one begins."""
    name = f"{ASIDE}{max(begin, 0):08d}"
    return folder / (f"{name}-{attempt}" if attempt else name)


def set_aside(folder: Path, step: int, aside: Path, names: Sequence[str]) -> None:
    """Move these files of a step, the last of which vouches for the others, to the same step in `aside`."""
    before, after = step_folder(folder, step), step_folder(aside, step)
    after.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in names:
        with suppress(FileNotFoundError):
            (before / name).replace(after / name)
    with suppress(OSError):  # others have files there
        before.rmdir()


def remove_before(folder: Path, step: int) -> None:
    """Remove the checkpoints of all earlier steps, and what attempts set aside that began before it."""
    for earlier in steps_in(folder):
        if earlier < step:
            shutil.rmtree(step_folder(folder, earlier), ignore_errors=True)
    for aside in folder.glob(f"{ASIDE}*"):
        begin = re.fullmatch(rf"{ASIDE}(\d+)(-\w+)?", aside.name)
        if begin is not None and int(begin[1]) < step:
            shutil.rmtree(aside, ignore_errors=True)
