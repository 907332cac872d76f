"""Folders that runs write to: tried before the first run starts, and named after Ctrl-C."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal.core.errors import Interrupted

CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Save checkpoints here; one that is there is resumed.", rich_help_panel="Files"
    ),
]
Every = Annotated[
    int | None,
    typer.Option(min=1, metavar="STEPS", help="Between two checkpoints.", rich_help_panel="Files"),
]


def check_file(option: str, path: Path) -> None:
    """Raise ValueError unless a file can be written there; missing folders are made."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it")
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise ValueError unless files can be written in that folder; it is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{option}: {folder} is not a folder") from None
    except OSError as error:
        raise ValueError(f"{option}: nothing can be written in {folder} ({error.strerror})") from None


def check_checkpoint(folder: Path | None, every: int | None) -> None:
    """Raise ValueError where checkpoints cannot be written as asked."""
    if folder is not None:
        check_folder("--checkpoint", folder)
    elif every is not None:
        raise ValueError("--every says how often to write a checkpoint; say where with --checkpoint DIR")


@contextmanager
def resumable(checkpoint: str | None) -> Iterator[None]:
    """After Ctrl-C, say what is saved and how to go on."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if checkpoint is None:
            advice = "Nothing is saved; with --checkpoint DIR it could go on later"
        elif any(Path(checkpoint).glob("step-*")):
            advice = f"The checkpoint is in {checkpoint}; the same command resumes from it"
        else:
            advice = f"There is no checkpoint in {checkpoint} yet; the same command starts again"
        raise Interrupted(f"stopped by Ctrl-C. {advice}.") from None
