"""--checkpoint and --every, and the message after Ctrl-C that says how to resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal.core.errors import Interrupted
from shoal.core.paths import check_folder
from shoal.launch.stop_signals import number_of, stopped_by

CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Save checkpoints in this folder, and resume from the one that is there.",
        rich_help_panel="Files",
    ),
]
Every = Annotated[
    int | None,
    typer.Option(min=1, metavar="STEPS", help="Steps between two checkpoints.", rich_help_panel="Files"),
]


def check_checkpoint(folder: Path | None, every: int | None, *, is_here: bool = True) -> None:
    """Raise ValueError where checkpoints cannot be written as asked. Other hosts check their own folders."""
    if folder is not None and is_here:
        check_folder("--checkpoint", folder)
    elif folder is None and every is not None:
        raise ValueError("--every sets how often to write a checkpoint; add --checkpoint DIR")


@contextmanager
def resumable(checkpoint: str | None) -> Iterator[None]:
    """After Ctrl-C or another signal, say whether a checkpoint was saved and how to resume."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        told = advice(checkpoint, getattr(stop, "saved", None))
        raise stopped_by(number_of(stop), f". {told}.") from None


def advice(checkpoint: str | None, saved: bool | None = None) -> str:
    """Whether a stopped run has left a checkpoint, and how to resume from it.

    `saved` tells whether all hosts have one; None if the folder tells.
    """
    if checkpoint is None:
        return "No checkpoint was saved; add --checkpoint DIR to be able to resume"
    where = checkpoint if saved is None else f"{checkpoint} on every host"
    if _has_checkpoint(Path(checkpoint)) if saved is None else saved:
        return f"The checkpoint is in {where}; the same command resumes from it"
    return f"There is no checkpoint in {where} yet; the same command starts again"


def _has_checkpoint(folder: Path) -> bool:
    """Whether a run could resume there, in one of its legs if its crew grows."""
    return any(any(folder.glob(kind)) for kind in ("step-*", "leg-*/step-*", "leg-*/edge"))
