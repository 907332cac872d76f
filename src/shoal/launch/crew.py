"""Crew: the processes of one run on this host, from start to end; no orphan, no hang."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from shoal.core.errors import Interrupted, WorkerFailed

LOG = logging.getLogger("shoal")

START_SECONDS = 120.0
"""How long all processes together may take at least until they are ready to train."""

CAUSE_SECONDS = 1.0
"""How long after a failure others may still report the cause of it."""

END_SECONDS = 3.0
"""How long a process may take to end after it was asked to."""

LOOK_SECONDS = 0.1

NUDGE_SECONDS = 0.3
"""How long workers that paused wait for the others before they go on together."""


class Process(Protocol):
    """What is asked of a process, whichever way it was started."""

    @property
    def exitcode(self) -> int | None:
        """Its exit code once it has ended."""
        ...

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        ...

    def close(self) -> None:
        """Release what was held for it, once it has ended."""
        ...


@dataclass
class Member:
    """One node's process, with the launcher's end of its control line."""

    rank: int
    name: str
    process: Process
    connection: Connection
    incarnation: int = 0
    ready: bool = False
    paused_at: int | None = None
    report: dict[str, Any] | None = None  # what it said when it was done
    failure: dict[str, Any] | None = None
    ended: bool = False


@dataclass
class Crew:
    """The members of a run. `on_progress` hears how they get on.

    Where there is a server, workers that are killed are done without as long as one is left. With `restart`,
    which starts the process of a rank again as a later incarnation, a server that is killed comes back.
    """

    workers: int
    on_progress: Callable[[dict[str, Any]], None] = lambda event: None
    start_seconds: float = START_SECONDS
    restart: Callable[[int, int], Member] | None = None
    members: list[Member] = field(default_factory=list)
    _went_at: float = 0.0
    _stop_asked: bool = False
    _next_nudge: float = 0.0
    _meeting_step: int = 0
    _stride: int = 1
    _interrupted: bool = False

    def see_through(self) -> list[dict[str, Any]]:
        """Give the word to go when all are ready, and wait for all reports.

        Raises WorkerFailed for the first failure that no other caused, and Interrupted after Ctrl-C.
        Whatever happens, no process is left when this returns.
        """
        try:
            with self._signals():
                self._await_ready()
                self._went_at = time.monotonic()
                self._order_all({"order": "go"})
                while any(not m.ended for m in self.members):
                    self._listen()
                    self._steer()
            for m in self.members:
                m.process.join(END_SECONDS)
        finally:
            self._end_all()
        if self._interrupted:
            raise Interrupted("stopped by Ctrl-C")
        return [m.report or {} for m in self.members]

    def ask_to_stop(self) -> None:
        """Have everyone stop at the same step, with a checkpoint where one was asked for."""
        if not self._stop_asked:
            self._stop_asked = True
            self._next_nudge = time.monotonic() + NUDGE_SECONDS
            self._order_all({"order": "stop"})

    def _await_ready(self) -> None:
        patience = max(START_SECONDS, self.start_seconds)
        deadline = time.monotonic() + patience
        while any(not (m.ready or m.ended) for m in self.members):
            self._listen()
            if self._stop_asked:
                raise Interrupted("stopped by Ctrl-C before training began")
            if time.monotonic() > deadline:
                late = ", ".join(m.name for m in self.members if not m.ready)
                raise WorkerFailed(f"{late} did not become ready within {patience:g} s")

    def _steer(self) -> None:
        """Bring all workers to the same step, and have them stop there.

        One that was told to stop pauses; another may have begun the next step before it was told, and now
        wait for the first. So while not all have paused, those that have go on together, further each time.
        """
        active = [m for m in self.members if not (m.ended or m.report) and m.rank < self.workers]
        paused = {m.rank: m.paused_at for m in active if m.paused_at is not None}
        if not self._stop_asked or not paused:
            return
        wait_for_each_other = len(self.members) == self.workers  # with a server they only wait for that
        if wait_for_each_other and len(paused) < len(active) and time.monotonic() > self._next_nudge:
            self._meeting_step = max(self._meeting_step, *paused.values()) + self._stride
            self._stride *= 2
            self._next_nudge = time.monotonic() + NUDGE_SECONDS
        for m in active:
            if m.paused_at is not None and m.paused_at < self._meeting_step:
                self._send_on(m, self._meeting_step, final=False)
        if all(m.paused_at is not None for m in active):
            # too late for a whole checkpoint: let the others finish too
            finished = any(m.report for m in self.members if m.rank < self.workers)
            step = None if finished else max(paused.values())
            for m in active:
                self._send_on(m, step, final=True)

    def _send_on(self, member: Member, step: int | None, *, final: bool) -> None:
        member.paused_at = None
        self._order(member, {"order": "run to", "step": step, "final": final})

    def _listen(self) -> None:
        """Take in what members say, and notice those that died."""
        lines = {m.connection: m for m in self.members if not m.ended}
        for line in wait(list(lines), LOOK_SECONDS):
            member = lines[line]  # type: ignore[index]
            try:
                self._take(member, json.loads(member.connection.recv_bytes()))
            except (EOFError, OSError):
                self._gone(member)
        for m in lines.values():
            if not m.ended and not m.process.is_alive() and not m.connection.poll():
                self._gone(m)
        if any(m.failure for m in self.members):
            self._fail()

    def _take(self, member: Member, said: dict[str, Any]) -> None:
        event = said.pop("event")
        if event == "ready":
            member.ready = True
            if member.incarnation:
                self._order(member, {"order": "go", "elapsed": time.monotonic() - self._went_at})
        elif event == "progress":
            self.on_progress(said)
        elif event == "paused":
            member.paused_at = said["step"]
        elif event == "done":
            member.report = said
        elif event == "interrupted":
            self._interrupted = True
        elif event == "failed":
            member.failure = said

    def _gone(self, member: Member) -> None:
        """A member hung up without a last word."""
        member.ended = True
        member.process.join(END_SECONDS)
        code = member.process.exitcode
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if not (code < 0 and self._survives(member, how)):
                member.failure = {"message": f"it {how}", "details": "", "follows": False}

    def _survives(self, member: Member, how: str) -> bool:
        """Whether the run goes on without a member that was killed, or with its successor."""
        if self._stop_asked or not self._went_at or len(self.members) == self.workers:
            return False
        if member.rank < self.workers:
            workers = [m for m in self.members if m.rank < self.workers and not m.failure]
            left = sum(not m.ended or bool(m.report) for m in workers)
            if left:
                LOG.warning("%s %s; the other %d go on", member.name, how, left)
            return left > 0
        if self.restart is None or not member.ready:  # it never came so far: it would not the next time
            return False
        LOG.warning("%s %s; it is started again", member.name, how)
        successor = self.restart(member.rank, member.incarnation + 1)
        self.members[self.members.index(member)] = successor
        member.connection.close()
        member.process.close()
        return True

    def _fail(self) -> None:
        """Raise the failure that no other caused. A lost peer is a consequence of the peer's own failure."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline and all(m.failure["follows"] for m in self.members if m.failure):
            for m in self.members:
                if not m.ended and m.failure is None and m.connection.poll(0.01):
                    try:
                        self._take(m, json.loads(m.connection.recv_bytes()))
                    except (EOFError, OSError):
                        self._gone(m)
        failed = [m for m in self.members if m.failure]
        first = next((m for m in failed if m.failure and not m.failure["follows"]), failed[0])
        failure = first.failure or {}
        raise WorkerFailed(f"{first.name} failed: {failure['message']}", failure["details"])

    def _order_all(self, order: dict[str, Any]) -> None:
        for m in self.members:
            if not m.ended:
                self._order(m, order)

    def _order(self, member: Member, order: dict[str, Any]) -> None:
        try:
            member.connection.send_bytes(json.dumps(order).encode())
        except OSError:  # it is gone; `_listen` finds out how
            return

    def _end_all(self) -> None:
        for m in self.members:
            if m.process.is_alive():
                m.process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for m in self.members:
            m.process.join(max(0.0, deadline - time.monotonic()))
            if m.process.is_alive():
                m.process.kill()
                m.process.join(END_SECONDS)
            m.process.close()
            m.connection.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C asks for an orderly stop, the second ends everything at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(signum: int, frame: object) -> None:
            if self._stop_asked:
                raise KeyboardInterrupt
            self.ask_to_stop()

        before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, old in before.items():
                signal.signal(s, old)


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """What is started meanwhile ignores Ctrl-C, which is meant for the launcher."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
