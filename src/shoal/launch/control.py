"""Control: what a node's process and whoever started it say to each other, as JSON lines on a pipe.

node -> launcher   ready | progress | paused (step) | idle | done (report) | interrupted | failed (text)
launcher -> node   go (elapsed, finished) | stop | run to (step; final: stop there, else pause again)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import PeerLost, ShoalError
from shoal.engine.engine import Engine, Instrument

WARNING_SECONDS = 5.0
"""How long compression is looked on before it is judged."""

COSTLY = 0.05
"""The share of a node's time that it may lose without a word."""

PROGRESS_SECONDS = 0.2
PACKAGE = Path(__file__).parent.parent


class Go(NamedTuple):
    """The word to go, and what a node that was started again has missed."""

    elapsed: float  # seconds since the others got it
    finished: tuple[int, ...]  # workers that have done all they had to, and left


class Control:
    """A node's line to its launcher. A node that nobody launched has none: then it just goes."""

    def __init__(self, connection: Connection | None = None) -> None:
        self._connection = connection
        self._arrivals = select.poll()  # kept: to make one at every step takes longer than to ask it
        if connection is not None:
            self._arrivals.register(connection.fileno(), select.POLLIN)

    def tell(self, event: str, **fields: Any) -> None:
        """Say something. A launcher that is gone ends this process: nobody is left to report to."""
        if self._connection is None:
            return
        try:
            self._connection.send_bytes(json.dumps({"event": event, **fields}).encode())
        except OSError:
            os._exit(1)

    def heard(self) -> dict[str, Any] | None:
        """An order that has arrived, if any; never waits."""
        if self._connection is None or not self._arrivals.poll(0):
            return None
        return self.await_order()

    def await_order(self) -> dict[str, Any]:
        """The next order; waits for it."""
        if self._connection is None:
            return {"order": "go"}
        try:
            order: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            os._exit(1)
        return order

    def await_go(self) -> Go:
        """Wait for the word to go."""
        order = self.await_order()
        return Go(float(order.get("elapsed", 0.0)), tuple(order.get("finished", ())))

    def tell_failure(self, error: BaseException) -> None:
        """Report an exception; with its traceback unless it is one of ours, whose message says it all."""
        ours = isinstance(error, ShoalError) or (isinstance(error, ValueError) and _raised_by_us(error))
        self.tell(
            "failed",
            message=str(error) if ours else f"{type(error).__name__}: {error}",
            details="" if ours else users_traceback(error),
            follows=isinstance(error, PeerLost),
        )

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()


class Reporter(Instrument):
    """Tells the launcher how a node gets on, a few times a second."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._began: float | None = None
        self._next = 0.0
        self._samples_before = 0
        self._waited_before = 0.0
        self._has_warned = False

    def step(self, engine: Engine) -> None:
        self._report(engine)

    def update(self, engine: Engine) -> None:
        self._report(engine)

    def _report(self, engine: Engine) -> None:
        now = engine.channel.now()
        if self._began is None:
            self._began, self._samples_before = now, engine.progress.samples
            self._waited_before = engine.meter.wait_seconds
        if now < self._next:
            return
        self._next = now + PROGRESS_SECONDS
        elapsed = now - self._began
        self._control.tell("progress", **progress(engine, elapsed, self._samples_before, self._waited_before))
        if (
            not self._has_warned
            and elapsed > WARNING_SECONDS
            and engine.meter.saved_seconds < -COSTLY * elapsed
        ):
            self._has_warned = True
            self._control.tell("warning", text=_does_not_pay(engine))


def progress(
    engine: Engine, elapsed: float, samples_before: int = 0, waited_before: float = 0.0
) -> dict[str, Any]:
    """How a node gets on, in plain numbers; rates are over the `elapsed` seconds since what was before."""
    meter, done = engine.meter, engine.progress
    return {
        "rank": engine.rank,
        "role": "server" if engine.is_server else "worker",
        "step": done.version if engine.is_server else done.t,
        "steps": engine.work.last_step,
        "loss": meter.loss,
        "samples": done.samples,
        "samples_per_second": (done.samples - samples_before) / elapsed if elapsed else 0.0,
        "wait_fraction": (meter.wait_seconds - waited_before) / elapsed if elapsed else 0.0,
        "bytes_sent": meter.bytes_sent,
        "saved_seconds": meter.saved_seconds if meter.coded_bytes else None,
    }


def _does_not_pay(engine: Engine) -> str:
    meter = engine.meter
    spent = meter.encode_seconds + meter.decode_seconds
    return (
        f"compression costs {engine.name} more than it saves: {spent:.1f} s of encoding and "
        f"decoding for {(meter.dense_bytes - meter.coded_bytes) / 1e6:,.0f} MB that were not sent. "
        "Try without a codec."
    )


def leave_with_parent() -> None:
    """Have the kernel end this process when the one that started it dies, where the system can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which asks us to stop
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def users_traceback(error: BaseException) -> str:
    """The traceback as its reader needs it: from the first frame that is neither ours nor runpy's."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame is ours, so that the message says it all."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def _is_ours(filename: str) -> bool:
    return "runpy" in filename or Path(filename).is_relative_to(PACKAGE)
