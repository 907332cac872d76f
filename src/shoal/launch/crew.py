"""Crew: starts, steers and ends the processes of one run, without orphans or hangs."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import wait
from typing import Any, TypeAlias

from shoal.core.errors import WorkerFailed
from shoal.core.limits import PATIENCE_SECONDS
from shoal.launch.joint_stop import JointStop
from shoal.launch.member import Member, order
from shoal.launch.silence import Silence
from shoal.launch.spares import Spares
from shoal.launch.stop_signals import StopSignal, stop_signals, stopped_by
from shoal.launch.visitors import LAST_SECONDS, Visitors

LOG = logging.getLogger("shoal")

Listener: TypeAlias = Callable[[dict[str, Any]], None]
"""A callback that receives the progress events of a run's nodes."""

START_SECONDS = 120.0
"""The least time limit for all processes to become ready to train."""

CAUSE_SECONDS = 1.0
"""How long the launcher waits after a failure for another node to report its cause."""

END_SECONDS = 3.0
"""How long a process may take to end when it is done, or was killed."""

MOST_FALSE_STARTS = 3
"""How often a process that was killed is started again if it is killed each time before it is ready."""

LOOK_SECONDS = 0.1


@dataclass
class Crew:
    """The members of a run. `start(rank, incarnation)` starts the process of each.

    With servers, or with `goes_on`, the run continues without a killed worker as long as another is left.
    With `takes_over` the others do what a killed worker left undone; if not, a warning says that nobody does.
    With `restarts` a killed server is restarted, as the next incarnation; with `workers_return` a worker is,
    too; `ends_because` says why the run ends with one instead. With `has_keeper` the last member keeps the
    roster of the others, and of `visitors` from elsewhere; `spares` take the place of workers. `on_progress`
    receives the progress events of all members. `look` is called several times a second; what it raises ends
    the run. In groups of `group` processes, which have following ranks,
    the first speaks for its group; if one is killed, all end.
    """

    workers: int  # processes of workers
    servers: int
    start: Callable[[int, int], Member]
    on_progress: Listener = lambda event: None
    start_seconds: float = START_SECONDS
    patience: float = PATIENCE_SECONDS  # how long a process may be silent before it is killed
    restarts: bool = False
    goes_on: bool = False
    takes_over: bool = False
    workers_return: bool = False
    ends_because: str = ""
    has_keeper: bool = False
    spares: Spares = field(default_factory=Spares)
    group: int = 1
    look: Callable[[], None] = lambda: None
    on_given_up: Callable[[int, int], None] = lambda rank, incarnation: None  # who is not started again
    began_at: float | None = None  # when the run began, where these members go on from others
    members: list[Member] = field(default_factory=list)
    _went_at: float = 0.0
    _stop_asked: int = 0  # the number of the signal
    _warned: set[str] = field(default_factory=set)
    _stop: JointStop | None = None
    _deal: Any = None  # of the data, in a run that was resumed
    _interrupted: bool = False
    _has_ended: bool = False
    _is_over: bool = False  # the keeper lets nobody in any more
    _alone_since: float | None = None  # when only the keeper was left

    @cached_property
    def visitors(self) -> Visitors:
        """The workers that joined from elsewhere."""
        return Visitors(self.on_progress)

    def see_through(self, meanwhile: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Start all processes, have them train once all are ready, and return their reports.

        Calls `meanwhile` when they have begun to train. Raises WorkerFailed with the root cause of a failure,
        and Interrupted after Ctrl-C. No process is left when this returns or raises.
        """
        silence = Silence(self.patience)
        try:
            with stop_signals(lambda: bool(self._stop_asked) or not self._went_at, self.ask_to_stop):
                if not self.members:
                    self.start_all()
                self._await_ready()
                now = time.monotonic()
                self._went_at = self.began_at = now if self.began_at is None else self.began_at
                for m in self.members:
                    order(m, {"order": "go", "elapsed": now - self._went_at})
                meanwhile()
                self.spares.fill()
                while any(not m.ended for m in self.members):
                    self._listen()
                    if self._stop_asked:
                        self._steer()
                    self._dismiss_latecomers()
                    silence.end_frozen(self.members, self._stop_asked)
            for m in self.members:
                m.process.join(END_SECONDS)
        except StopSignal as stop:
            raise stopped_by(stop.number, "" if self.began_at else " before training began") from None
        finally:
            self.end_all()
        if self._interrupted:
            raise stopped_by(self._stop_asked or signal.SIGINT)
        workers = self.members[: self.workers]
        if self.has_keeper and any(m.incarnation for m in workers) and not any(m.report for m in workers):
            raise WorkerFailed("every worker that had the model was killed; resume from a checkpoint")
        return [m.report or {} for m in self.members]

    def ask_to_stop(self, number: int = signal.SIGINT) -> None:
        """Have all workers stop, with checkpoints at the same step, because of that signal."""
        self._stop_asked = number

    @property
    def was_asked_to_stop(self) -> int:
        """The signal that asked, although the workers may have been done before they could stop; else 0."""
        return self._stop_asked

    def start_all(self) -> None:
        """Start all processes, which then wait for `see_through` to have them train."""
        for rank in range(self.workers + self.servers + self.has_keeper):
            self.members.append(self.start(rank, 0))

    def _await_ready(self) -> None:
        patience = max(START_SECONDS, self.start_seconds)
        deadline = time.monotonic() + patience
        while any(not (m.ready or m.ended) for m in self.members):
            self._listen()
            if time.monotonic() > deadline:
                late = ", ".join(m.name for m in self.members if not m.ready)
                raise WorkerFailed(f"{late} did not become ready within {patience:g} s")

    def _steer(self) -> None:
        """After a request to stop, bring all workers to the same step and stop them there."""
        if self._stop is None:
            is_loose = bool(self.servers) or self.goes_on
            self._stop = JointStop(self.members, self.workers, is_loose)
        self._stop.go_on()

    def _listen(self) -> None:
        """Handle the members' events, and notice members that died. Raises WorkerFailed if one failed."""
        running = [m for m in self.members if not m.ended]
        self._hear(running, LOOK_SECONDS)
        self.look()
        for m in running:
            if not m.ended and not m.process.is_alive() and not m.connection.poll():
                self._gone(m)
        for m in [m for m in self.members if m.failure and self.group > 1]:
            if (dead := self._killed_beside(m)) is not None:
                m.failure = None  # it only noticed that the other has gone
                self._gone(dead)
        if any(m.failure for m in self.members):
            self._fail()

    def _group_of(self, member: Member) -> list[Member]:
        """The processes of the same group, the first of which speaks for it."""
        first = member.rank - member.rank % self.group
        return self.members[first : first + self.group]

    def _killed_beside(self, member: Member) -> Member | None:
        """A process of its group that was killed and is not dealt with yet. Waits a moment for its end."""
        others = [m for m in self._group_of(member) if m is not member and not m.ended]
        deadline = time.monotonic() + CAUSE_SECONDS
        while others and time.monotonic() < deadline:
            for m in others:
                if (m.process.exitcode or 0) < 0:
                    return m
            time.sleep(LOOK_SECONDS / 10)
        return None

    def _end_group(self, member: Member) -> None:
        """Kill the other processes of a group of which one was killed: they would wait for it."""
        for m in self._group_of(member):
            if m is not member and not m.report:
                m.ended, m.failure = True, None
                m.process.kill()

    def _hear(self, members: list[Member], seconds: float) -> None:
        """Wait up to `seconds` for events of these members, or the end of their connections; handle them."""
        lines = {m.connection: m for m in members}
        for line in wait(list(lines), seconds):
            member = lines[line]  # type: ignore[index]
            if member.ended or not member.connection.poll():  # with its group, or heard, meanwhile
                continue
            try:
                self._take(member, json.loads(member.connection.recv_bytes()))
            except (EOFError, OSError):
                self._gone(member)

    def _take(self, member: Member, said: dict[str, Any]) -> None:
        event = said.pop("event")
        if event == "ready":
            if said.get("survives"):  # a strategy that perhaps only the script names
                self.goes_on, self.takes_over = True, False
            self.workers_return = self.workers_return and said.get("returns", True)
            member.ready = not member.incarnation or self._may_come_back()
            if member.incarnation and member.ready:
                self._welcome(member)
        elif event == "progress":
            if member.report is None:  # its thread may have sent one more
                member.note_progress(said)
                self._tell(member)
        elif event == "dealt":
            self._deal = said["deal"]
        elif event == "figures":
            self._tell(member, **said)
        elif event == "warning":
            if said["text"] not in self._warned:  # all workers may send the same warning
                LOG.warning("%s", said["text"])
            self._warned.add(said["text"])
        elif event == "place":
            self.visitors.hear(
                said["rank"], said["of"], time.monotonic() - (self._went_at or time.monotonic())
            )
        elif event == "paused":
            member.paused_at = said["step"]
        elif event == "idle":
            member.is_idle = True
        elif event == "done":
            member.report = said
            member.progress["state"] = "done"
            self._tell(member)
        elif event == "interrupted":
            self._interrupted = True
        elif event == "came too late":
            member.ready = False
        elif event == "over":
            self._is_over = True
        elif event == "failed":
            member.failure = said

    def _may_come_back(self) -> bool:
        """Whether a worker that was started again, and is ready now, can take part.

        The keeper says that the run is over before it closes its connections. Who is ready without that word
        has met it, and hears the rest from there; who comes later would wait in vain for another keeper.
        """
        keeper = self.members[-1]
        while self.has_keeper and not (self._is_over or keeper.ended) and keeper.connection.poll():
            self._hear([keeper], 0.0)
        return not self._is_over

    def _welcome(self, member: Member) -> None:
        """Have a member that was started again train, with what it has missed."""
        self._tell(member, state="waiting", fault=f"{member.name} is back")
        finished = [m.rank for m in self.members if m.rank < self.workers and m.report]
        elapsed = time.monotonic() - self._went_at
        order(member, {"order": "go", "elapsed": elapsed, "finished": finished, "deal": self._deal})
        if self._stop is not None:
            order(member, {"order": "stop"})

    def _gone(self, member: Member) -> None:
        """Handle a member whose connection has ended, normally or not."""
        member.ended = True
        member.process.join(END_SECONDS)
        code = member.process.exitcode
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            how = member.why_lost or how
            if code < 0 and self.group > 1:
                self._end_group(member)
                how += f"; its group of {self.group} processes ends with it"
            if member.failure is None and not (code < 0 and self._survives(member, how)):
                if code < 0 and self._went_at and not self._stop_asked:
                    how += self.ends_because
                follows = any(m.failure and not m.failure["follows"] for m in self.members)
                member.failure = {"message": f"it {how}", "details": "", "follows": follows}

    def _survives(self, member: Member, how: str) -> bool:
        """Whether the run continues after a member was killed: without it, or with its successor."""
        if self._stop_asked or not self._went_at or any(m.failure for m in self.members):
            return False
        if not (self.servers or self.goes_on or (self.has_keeper and self.members[-1].is_needed)):
            return False
        if member.rank < self.workers:
            return self._goes_on_without(member, how)
        if not self.restarts or _false_starts(member) >= MOST_FALSE_STARTS:
            return False
        LOG.warning("%s %s; it is started again", member.name, how)
        self._start_again(member, how)
        return True

    def _goes_on_without(self, member: Member, how: str) -> bool:
        """Whether workers are left after one was killed. It is started again where it can come back."""
        first = [m for m in self.members if m.rank < self.workers and m.rank % self.group == 0]
        left = sum((not m.ended and (m.ready or not m.incarnation)) or bool(m.report) for m in first)
        left += len(self.visitors.present)
        if not left and not (self.servers and self.workers_return):  # else a server has the model
            return False
        if self.workers_return and not self._is_over and _false_starts(member) < MOST_FALSE_STARTS:
            with suppress(WorkerFailed):  # its host is lost
                self._start_again(member, how)
                LOG.warning("%s %s; the other %d go on, and it is started again", member.name, how, left)
                return True
        undone = "" if self.takes_over else f". Nobody does {self._group_of(member)[0].undone}"
        LOG.warning("%s %s; the other %d go on%s", member.name, how, left, undone)
        self.on_given_up(member.rank, member.incarnation)
        self._tell(member, lost=True, state="dead", fault=f"{member.name} {how}")
        return True

    def _dismiss_latecomers(self) -> None:
        """End workers that were started again and are not ready when the run is over; then the keeper."""
        workers = [m for m in self.members if m.rank < self.workers]
        late = [m for m in workers if m.incarnation and not (m.ready or m.ended)]
        done = bool(self._stop_asked) or any(m.report for m in workers)
        done = done and all(m.report or m.ended or m in late for m in workers)
        alone = self.has_keeper and all(m.ended for m in self.members[:-1]) and self._has_heard_visitors()
        for m in [*(late if done or self._is_over else ()), *(self.members[-1:] if alone else ())]:
            m.ended = True
            m.process.kill()

    def _has_heard_visitors(self) -> bool:
        """Whether all reports from elsewhere have come, or have had their time."""
        if self._alone_since is None:
            self._alone_since = time.monotonic()
        late = time.monotonic() > self._alone_since + LAST_SECONDS
        return late or not self.visitors.present

    def _start_again(self, member: Member, how: str) -> None:
        """Start the next incarnation of a member that was killed. Raises WorkerFailed if its host is lost."""
        place = member.rank, member.incarnation + 1
        spare = self.spares.take(member.name, *place) if member.rank < self.workers else None
        successor = spare or self.start(*place)
        self._tell(member, lost=True, state="dead", fault=f"{member.name} {how}")
        self.members[self.members.index(member)] = successor
        member.connection.close()
        member.process.close()
        successor.false_starts = _false_starts(member)
        successor.progress = {**member.progress, "state": "joining"}
        self._tell(successor)

    def _tell(self, member: Member, **news: Any) -> None:
        """Pass a member's last progress on to the listener, with the time of the run and the news, if any."""
        first = self._group_of(member)[0]
        if (member is not first and "lost" not in news) or member.rank == self.workers + self.servers:
            return
        role = "worker" if member.rank < self.workers else "server"
        rank = member.rank // self.group
        nothing_yet = {"rank": rank, "role": role, "step": 0, "steps": None, "loss": float("nan")}
        elapsed = time.monotonic() - self._went_at if self._went_at else 0.0
        self.on_progress({**nothing_yet, **first.progress, "seconds": elapsed, **news})

    def _fail(self) -> None:
        """Raise WorkerFailed for the root cause. A lost peer is a consequence of that peer's own failure."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while all(m.failure["follows"] for m in self.members if m.failure):
            silent = [m for m in self.members if not (m.ended or m.failure)]
            left = deadline - time.monotonic()
            if not silent or left <= 0:
                break
            self._hear(silent, left)
        failed = [m for m in self.members if m.failure]
        first = next((m for m in failed if m.failure and not m.failure["follows"]), failed[0])
        failure = first.failure or {}
        raise WorkerFailed(f"{first.name} failed: {failure['message']}", failure["details"])

    def end_all(self) -> None:
        """Kill all processes that still run."""
        if self._has_ended:
            return
        self._has_ended = True
        self.spares.end_all()
        for m in self.members:
            if m.process.is_alive():
                m.process.kill()
        deadline = time.monotonic() + END_SECONDS
        for m in self.members:
            m.process.join(max(0.0, deadline - time.monotonic()))
            m.process.close()
            m.connection.close()


def _false_starts(member: Member) -> int:
    """How often in a row that member, now dead, was killed before it was ready."""
    return 0 if member.ready else member.false_starts + 1
