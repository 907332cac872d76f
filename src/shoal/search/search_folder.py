"""The folder of a search: its journal, its pieces, the best model. Needs no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.core.paths import check_folder

JOURNAL = "journal.jsonl"

PIECES = "pieces"
"""The folder with a folder for each piece whose checkpoint may still be needed."""

MODEL = "model.safetensors"
"""The best model, in the folder of its search; of a piece, the model that it trained."""


def check_search_folder(folder: Path, resume: bool) -> None:
    """Raise ValueError for a folder with another search, or with none to resume."""
    path = folder / JOURNAL
    there = path.is_file() and path.stat().st_size > 0
    if there and not resume:
        raise ValueError(f"{folder} holds a search; resume it with --resume, or name another folder")
    if resume and not there:
        raise ValueError(f"there is no search in {folder} to resume; leave --resume out to begin one")
    check_folder("--folder", folder)


def piece_folder(pieces: Path, number: int) -> Path:
    """Where the checkpoints of a piece lie, and its model when it is done."""
    return pieces / f"{number:06d}"


def remove_pieces(pieces: Path, needed: set[int]) -> None:
    """Remove the folders of all pieces but these."""
    for folder in pieces.glob("[0-9]*"):
        if folder.name.isdigit() and int(folder.name) not in needed:
            shutil.rmtree(folder, ignore_errors=True)
