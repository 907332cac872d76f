"""folder_lock: one run at a time uses a folder of checkpoints. Needs no torch.

The lock is the kernel's, on the file `run.lock`, so it ends with the process that holds it. The file says who
that is, and is removed in the end; after a `kill -9` it stays, and does no harm.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.core.errors import CheckpointError
from shoal.storage.whole_files import PART, cannot_write

NAME = "run.lock"
MARK = "attempt"  # see attempt_mark.py
RUN = "; its hosts know it as "

NAME_SECONDS, OWN_SECONDS = 0.5, 3.0
"""How long a lock may be without the name of its run, and without that of this run if another host has it."""

LOG = logging.getLogger("shoal")


@contextmanager
def folder_lock(
    folder: str | Path | None, *, others_write: bool = False, run: str | None = None, is_new: bool = True
) -> Iterator[None]:
    """Use the folder alone. Raises CheckpointError that names the run which uses it. None is no folder.

    What a killed run has left half-written is removed, and in the end what this one has; not if
    `others_write`: then processes that this one has not started may still be about it. With the secret name
    of a `run` the folder may be in use by another host of the same one, which can reach it, too, and may be
    writing unless the run `is_new`.
    """
    if folder is None:
        yield
        return
    path = Path(folder)
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = _locked(path, run)
    except OSError as error:
        raise cannot_write(path / NAME, error) from error
    if file is None:
        yield
        return
    try:
        if is_new:
            _remove_parts(path)
        yield
    finally:
        if not others_write:
            _remove_parts(path)
            _remove_mark(path)
        (path / NAME).unlink(missing_ok=True)  # while it is locked: nobody else has begun to use it
        os.close(file)
        with suppress(OSError):  # there is something in it
            for place in made:
                place.rmdir()


def _locked(folder: Path, run: str | None) -> int | None:
    """The open file of the lock, which is ours now; None if another host of the same run has it."""
    path = folder / NAME
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            is_ours = _lock(file, folder, run)
            if is_ours and _is_still(path, file):
                os.truncate(file, 0)
                os.write(file, (_who() + ("" if run is None else RUN + run)).encode())
                os.fsync(file)  # for the other hosts
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        if not is_ours:
            return None
        # else its last owner has removed it meanwhile


def _lock(file: int, folder: Path, run: str | None) -> bool:
    """Lock the file; False if another host of the same run has done so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who, is_same = _holder(folder / NAME, run)
        if is_same:
            return False
        raise CheckpointError(
            f"another run uses the checkpoints in {folder}: {who}. Stop it, or name another folder."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        LOG.warning(
            "the file system of %s has no locks (%s): see to it that no other run uses this folder",
            folder,
            error.strerror,
        )
    return True


def _holder(path: Path, run: str | None) -> tuple[str, bool]:
    """What the file says of the run that has locked it, and whether that is this one, on another host.

    It is written a moment after it is locked: until then it is empty, or has the name of a run before.
    """
    who, until = "", time.monotonic() + (OWN_SECONDS if run is not None else NAME_SECONDS)
    while time.monotonic() < until:
        with suppress(OSError):
            who, _, theirs = path.read_text(errors="replace").strip().partition(RUN)
            if run is not None and theirs == run:
                return who, True
            if who and run is None:
                break
        time.sleep(0.05)
    return who or "it does not say which", False


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _who() -> str:
    command = shlex.join([Path(sys.argv[0]).name or "python", *sys.argv[1:]])
    return f"process {os.getpid()} on {socket.gethostname()}, {command}"[:2048]


def _remove_mark(folder: Path) -> None:
    """Leave nothing of a run that has saved nothing, nor of a leg of it."""
    with suppress(OSError):  # somebody may have removed the folder
        for place in (*folder.glob("leg-*"), folder):
            if {entry.name for entry in place.iterdir()} <= {NAME, MARK}:
                (place / MARK).unlink(missing_ok=True)
                if place != folder:
                    place.rmdir()


def _remove_parts(folder: Path) -> None:
    for pattern in ("step-*/*", "leg-*/*/*", "model.safetensors", f"{MARK}.*", f"leg-*/{MARK}.*"):
        for part in folder.glob(pattern + PART):
            part.unlink(missing_ok=True)
