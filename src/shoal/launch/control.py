"""Control: the messages between a node's process and its launcher, as JSON on a pipe.

node -> launcher   ready | progress | figures | warning | saved (step) | dealt | paused (step) | idle |
                   over (at the keeper) | done (report) | came too late | interrupted | failed
launcher -> node   go (elapsed, finished, deal) | stop | run to (step; final: stop there, else pause again)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import PeerLost, ShoalError
from shoal.engine.engine import Engine, Instrument
from shoal.launch.stop_signals import STOPPING

LOG = logging.getLogger("shoal")

WARNING_SECONDS = 5.0
"""How long compression is measured before the node may warn about its cost."""

COSTLY = 0.05
"""The share of a node's time that compression may lose before the node warns."""

PROGRESS_SECONDS = 0.2

QUIET_SECONDS = 1.0
"""How long a step may take before the node reports in the middle of it, computing or waiting."""

TERM_SECONDS = 2.0
"""How long a node that gets SIGTERM waits to hear that its launcher got it, too."""

LAST_EVENTS = {"done", "interrupted", "failed"}
PACKAGE = Path(__file__).parent.parent


class Go(NamedTuple):
    """The order to start training, and what a restarted node has missed."""

    elapsed: float  # seconds since the other nodes started
    finished: tuple[int, ...]  # ranks of the workers that have finished and left
    deal: Any = None  # how the data is dealt in a run that was resumed; see BetweenSteps


class Control:
    """A node's connection to its launcher. Without a launcher there is none, and the node starts at once."""

    def __init__(self, connection: Connection | None = None) -> None:
        self.is_over = threading.Event()  # set when the node has nothing more to tell
        self._connection = connection
        self._is_told_to_stop = False
        self._one_at_a_time = threading.Lock()  # a node also reports from a thread: see Reporter
        self._arrivals = select.poll()  # reused: creating one at every step takes longer than polling
        if connection is not None:
            self._arrivals.register(connection.fileno(), select.POLLIN)

    def tell(self, event: str, **fields: Any) -> None:
        """Send an event to the launcher. If the launcher is gone, this process exits with code 1."""
        if self._connection is None:
            return
        said = json.dumps({"event": event, **fields}).encode()
        with self._one_at_a_time:
            try:
                self._connection.send_bytes(said)
            except OSError:
                os._exit(1)
            if event in LAST_EVENTS:
                self.is_over.set()

    def heard(self, step: int = 0) -> dict[str, Any] | None:
        """The next order if one has arrived, else None; never waits. The node is before `step`."""
        if self._connection is None or not self._arrivals.poll(0):
            return None
        return self.await_order()

    def await_order(self) -> dict[str, Any]:
        """Wait for the next order. If the launcher is gone, this process exits with code 1."""
        if self._connection is None:
            return {"order": "go"}
        try:
            order: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            os._exit(1)
        self._is_told_to_stop = self._is_told_to_stop or order["order"] not in ("go", "become")
        return order

    def await_go(self) -> Go:
        """Wait for the order to start training."""
        order = self.await_order()
        return Go(float(order.get("elapsed", 0.0)), tuple(order.get("finished", ())), order.get("deal"))

    def announce(self, text: str) -> None:
        """Have the user read a line, through the launcher if there is one."""
        if self._connection is None:
            LOG.warning("%s", text)
        else:
            self.tell("warning", text=text)

    def tell_failure(self, error: BaseException) -> None:
        """Report an exception, with its traceback unless Shoal raised it: then the message is enough."""
        ours = isinstance(error, ShoalError) or (isinstance(error, ValueError) and _raised_by_us(error))
        self.tell(
            "failed",
            message=str(error) if ours else f"{type(error).__name__}: {error}",
            details="" if ours else users_traceback(error),
            follows=isinstance(error, PeerLost),
        )

    def close(self) -> None:
        """Close the connection."""
        self.is_over.set()
        with self._one_at_a_time:
            if self._connection is not None:
                self._connection.close()

    def defer_sigterm(self) -> None:
        """Have SIGTERM end this process only if the launcher does not ask it to stop soon after.

        A service manager or a scheduler signals all processes of a run. Its checkpoint needs these.
        """
        node = os.getpid()

        def handle(number: int, frame: object) -> None:
            if os.getpid() == node:
                threading.Thread(target=self._await_stop, name="shoal waits for a stop", daemon=True).start()
            else:  # a process that the user's script has forked
                _end_by_sigterm()

        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, handle)

    def _await_stop(self) -> None:
        arrivals = select.poll()
        if self._connection is not None and not self._connection.closed:
            arrivals.register(self._connection.fileno(), select.POLLIN)
        if not (self._is_told_to_stop or arrivals.poll(1000 * TERM_SECONDS) or self._is_told_to_stop):
            _end_by_sigterm()

    @property
    def has_launcher(self) -> bool:
        """Whether anybody listens."""
        return self._connection is not None


class Activity:
    """What a node does: for whom it waits at this moment, else what it did most since the last report."""

    def __init__(self) -> None:
        self._before = (0.0, 0.0, 0.0)
        self._version = 0

    def now(self, engine: Engine) -> tuple[str, str]:
        """One word, computing, sending or waiting, and the message that it waits for, if it does."""
        meter, version, awaited = engine.meter, engine.progress.version, engine.mailbox.waiting
        totals = (meter.compute_seconds, meter.send_seconds, meter.wait_seconds)
        spent = [total - before for total, before in zip(totals, self._before, strict=True)]
        was, self._before, self._version = self._version, totals, version
        if engine.is_server:
            return ("computing", "") if version > was else ("waiting", awaited)
        if awaited:
            return "waiting", awaited
        return ("computing", "sending", "waiting")[spent.index(max(spent))], ""


class Reporter(Instrument):
    """Reports a node's progress to the launcher a few times a second.

    It reports after steps, and once a second from a thread while a step takes longer, and calls `prepare`
    before.
    """

    def __init__(self, control: Control, prepare: Callable[[], None] = lambda: None) -> None:
        self._control = control
        self._prepare = prepare
        self._activity = Activity()
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
            if self._control.has_launcher:
                threading.Thread(target=self._stand_by, args=[engine], name="progress", daemon=True).start()
        if now < self._next:
            return
        self._next = now + PROGRESS_SECONDS
        self._tell(engine, now - self._began)

    def _stand_by(self, engine: Engine) -> None:
        """Report while no step ends."""
        while not self._control.is_over.wait(QUIET_SECONDS):
            now = engine.channel.now()
            if self._began is not None and now > self._next + QUIET_SECONDS - PROGRESS_SECONDS:
                self._tell(engine, now - self._began)

    def _tell(self, engine: Engine, elapsed: float) -> None:
        self._prepare()
        said = progress(engine, elapsed, self._samples_before, self._waited_before, self._activity)
        self._control.tell("progress", **said)
        if (
            not self._has_warned
            and elapsed > WARNING_SECONDS
            and engine.meter.saved_seconds < -COSTLY * elapsed
        ):
            self._has_warned = True
            self._control.tell("warning", text=_does_not_pay(engine))


def progress(
    engine: Engine,
    elapsed: float,
    samples_before: int = 0,
    waited_before: float = 0.0,
    activity: Activity | None = None,
) -> dict[str, Any]:
    """The progress of a node as plain values.

    Rates are averages over the last `elapsed` seconds, at whose beginning the node had counted
    `samples_before` samples and `waited_before` seconds of waiting.
    """
    meter, done = engine.meter, engine.progress
    state, awaited = (activity or Activity()).now(engine)
    staleness = meter.staleness.copy()  # in one piece: another thread may be counting
    updates = sum(staleness.values())
    return {
        "seconds": elapsed,
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
        "compute_fraction": meter.compute_seconds / elapsed if elapsed else 0.0,
        "staleness": sum(late * count for late, count in staleness.items()) / updates if updates else None,
        "state": state,
        "awaits": awaited,
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
    """On Linux, have the kernel kill this process when its parent dies. Also ignores a terminal's signals."""
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)  # it goes to the launcher, which asks us to stop
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end_by_sigterm() -> None:
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python's own function is for the main thread alone
    os.kill(os.getpid(), signal.SIGTERM)


def users_traceback(error: BaseException) -> str:
    """The traceback, beginning with the first frame that is neither Shoal's nor runpy's."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _raised_by_us(error: BaseException) -> bool:
    """Whether Shoal itself raised the error: the innermost frame is in its code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def _is_ours(filename: str) -> bool:
    return "runpy" in filename or Path(filename).is_relative_to(PACKAGE)
