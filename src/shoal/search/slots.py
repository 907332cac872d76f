"""Slots: the processes in which trials train, as many at once as fit. A slot lives on from piece to piece."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.core.errors import Diverged, ShoalError, WorkerFailed
from shoal.launch.audience import Audience
from shoal.launch.control import leave_with_parent, users_traceback
from shoal.launch.keeper_process import FORK_SERVER, SLOW_IMPORTS
from shoal.launch.stop_signals import ctrl_c_ignored
from shoal.runs.processes import run_in_process, run_processes
from shoal.runs.result import Result
from shoal.search.inheritance import inherit
from shoal.search.search_folder import piece_folder
from shoal.search.searcher import TrialPiece
from shoal.search.trial_plan import TrialSettings
from shoal.storage.folder_lock import folder_lock

END_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """How a piece ended: "done" with its figures, "failed" with a message, or "killed" with its slot."""

    piece: int
    event: str
    told: Mapping[str, Any] = field(default_factory=dict)


class SlotPool(Protocol):
    """What a controller needs of its slots."""

    @property
    def free(self) -> int:
        """How many more pieces may start."""
        ...

    def start(self, piece: TrialPiece, origin: TrialPiece | None) -> None:
        """Train a piece in a free slot."""
        ...

    def wait(self, seconds: float) -> list[Ended]:
        """The pieces that have ended, after at most `seconds`."""
        ...

    def close(self) -> None:
        """End all slots at once."""
        ...


@dataclass
class _Slot:
    process: Any
    connection: Connection
    piece: int | None = None


class Slots:
    """Up to `count` processes of this host. One that dies is replaced when its slot is next needed.

    Their temporary files are in the folder `temporary`: a slot that is killed leaves them.
    """

    def __init__(self, settings: TrialSettings, pieces: Path, count: int, temporary: str) -> None:
        self.settings = settings
        self.pieces = pieces
        self.count = count
        self._slots: list[_Slot] = []
        self._temporary = temporary
        self._context = multiprocessing.get_context("forkserver")
        preload = [FORK_SERVER, "shoal.search.slots", *SLOW_IMPORTS, *settings.task.imports]
        self._context.set_forkserver_preload(preload)

    @property
    def free(self) -> int:
        """How many more pieces may start."""
        return self.count - sum(slot.piece is not None for slot in self._slots)

    @property
    def pids(self) -> list[int]:
        """The processes that train a piece now."""
        return [slot.process.pid for slot in self._slots if slot.piece is not None]

    def start(self, piece: TrialPiece, origin: TrialPiece | None) -> None:
        """Train a piece in a free slot."""
        slot = next((slot for slot in self._slots if slot.piece is None), None) or self._open()
        slot.piece = piece.number
        order = {"piece": piece.plain(), "origin": None if origin is None else origin.plain()}
        try:
            slot.connection.send_bytes(json.dumps(order).encode())
        except OSError:  # it died while it was idle; `wait` finds out
            return

    def wait(self, seconds: float) -> list[Ended]:
        """The pieces that have ended, after at most `seconds`."""
        lines = {slot.connection: slot for slot in self._slots}
        ended = []
        for line in wait(list(lines), seconds):
            slot = lines[line]  # type: ignore[index]
            try:
                told = json.loads(slot.connection.recv_bytes())
            except (EOFError, OSError):
                told = {"event": "killed", "how": self._bury(slot)}
            if slot.piece is not None:
                ended.append(Ended(slot.piece, told.pop("event"), told))
            slot.piece = None
        return ended

    def close(self) -> None:
        """End all slots at once; a piece that is under way continues from its last checkpoint later."""
        for slot in list(self._slots):
            slot.process.kill()
            self._bury(slot)

    def _open(self) -> _Slot:
        with ctrl_c_ignored():  # the fork server inherits this and keeps it
            forkserver.ensure_running()
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            name="trial slot",
            target=_slot_process,
            args=(self.settings, str(self.pieces), self._temporary, theirs),
        )
        with theirs:
            process.start()
        self._slots.append(_Slot(process, ours))
        return self._slots[-1]

    def _bury(self, slot: _Slot) -> str:
        """Remove a dead slot; returns how it ended."""
        self._slots.remove(slot)
        slot.connection.close()
        slot.process.join(END_SECONDS)
        if slot.process.exitcode is None:
            slot.process.kill()
            slot.process.join(END_SECONDS)
        code = slot.process.exitcode or 0
        slot.process.close()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _slot_process(settings: TrialSettings, pieces: str, temporary: str, connection: Connection) -> None:
    """The main function of a slot: train pieces until the controller is gone."""
    leave_with_parent()
    tempfile.tempdir = temporary
    os.setsid()  # Ctrl-C of the terminal is for the controller; runs inside would stop at it
    torch.set_num_threads(settings.threads or 1)
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        origin = None if order["origin"] is None else TrialPiece(**order["origin"])
        said = train_piece(settings, Path(pieces), TrialPiece(**order["piece"]), origin)
        try:
            connection.send_bytes(json.dumps(said).encode())
        except OSError:
            return


def train_piece(
    settings: TrialSettings, pieces: Path, piece: TrialPiece, origin: TrialPiece | None
) -> dict[str, Any]:
    """Train a piece in its own folder and score it. What goes wrong is told, not raised.

    A folder that is there already holds the checkpoints of an earlier attempt, which continues.
    """
    try:
        result = _train(settings, pieces, piece, origin)
    except Diverged as error:
        return {"event": "failed", "message": str(error), "details": "", "diverged": True}
    except WorkerFailed as error:
        if killed := re.search(r"was ended by (\w+)", str(error)):
            return {"event": "killed", "how": f"by {killed[1]}"}
        return {"event": "failed", "message": str(error), "details": error.details}
    except Exception as error:  # whatever the user's model or data raises
        ours = isinstance(error, ShoalError)
        message = str(error) if ours else f"{type(error).__name__}: {error}"
        return {"event": "failed", "message": message, "details": "" if ours else users_traceback(error)}
    return {
        "event": "done",
        "accuracy": result.test_accuracy,
        "loss": result.test_loss,
        "seconds": result.seconds,
        "parameters": result.parameters,
    }


def _train(settings: TrialSettings, pieces: Path, piece: TrialPiece, origin: TrialPiece | None) -> Result:
    target = piece_folder(pieces, piece.number)
    plan = settings.plan(piece.values, piece.end, str(target))
    data = plan.task.data()
    plan = replace(plan, every=max(1, plan.steps(data) // plan.epochs))
    if origin is not None and not target.exists():
        before = settings.plan(origin.values, origin.end)
        inherit(piece_folder(pieces, origin.number), before, target, plan, data)
    train = run_in_process if plan.nodes == 1 else run_processes
    with folder_lock(plan.checkpoint):  # a slot of a search that was killed may just be ending
        return train(plan, Audience(None))
