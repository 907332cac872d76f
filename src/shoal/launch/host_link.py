"""HostLink: the launcher's connection to the agent of one host, which it calls again when it is lost."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from queue import Empty, SimpleQueue
from typing import Any

from shoal.core.errors import Unavailable, WorkerFailed
from shoal.launch.agent import PULSE_SECONDS
from shoal.launch.agent_call import END_SECONDS, AgentCall, Start
from shoal.launch.hosts import Host
from shoal.launch.member import Member
from shoal.launch.versions import version

HELLO_SECONDS = 60.0
"""How long an agent may take to start once ssh was called."""

PREPARE_SECONDS = 30.0
"""How long an agent may take to compare the script and lock its folder."""

LOOK_SECONDS = 1.0

AGAIN_SECONDS = 1.0, 30.0
"""The first and the longest pause before a lost host is called again."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]
Printer = Callable[[str, str], None]


class RemoteProcess:
    """The process of a node on another host, as its agent reports it."""

    def __init__(self, send_signal: Callable[[int], None]) -> None:
        self._signal = send_signal
        self._ended = threading.Event()
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        """Whether the process still runs, as far as is known here."""
        return not self._ended.is_set()

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self._signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds."""
        self._ended.wait(timeout)

    def close(self) -> None:
        """Do nothing: there is nothing to release here."""

    def has_ended(self, code: int) -> None:
        """Note the exit code."""
        self.exitcode = code
        self._ended.set()


@dataclass
class RemoteNode:
    """A node on another host: its member of the crew, and our end of that member's connection.

    `start` is the message that starts it, perhaps when a host that is lost answers again.
    """

    name: str
    member: Member
    process: RemoteProcess
    pipe: Connection | None
    start: dict[str, Any]

    def tell_crew(self, event: dict[str, Any]) -> None:
        """Pass an event on to the crew."""
        if self.pipe is not None:
            try:
                self.pipe.send_bytes(json.dumps(event).encode())
            except OSError:  # the crew has given up on it
                self.hang_up()

    def hang_up(self) -> None:
        """Have the crew see that the connection has ended."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def end(self, code: int) -> None:
        """Have the crew see that the process has ended."""
        self.process.has_ended(code)
        self.hang_up()


class HostLink:
    """Starts the agent of a host and passes messages between it and the members of a crew.

    A thread moves all messages: it reads the agent's, and the orders that the crew writes to its members'
    connections. When the agent is lost, the thread calls it again and again, and starts the nodes that wait
    for it. `answer` answers a node's questions to the store; `on_saved` hears of every checkpoint, by
    the node's rank and step. `call` runs the command by which the agent is reached.
    """

    def __init__(
        self,
        host: Host,
        call: Start,
        *,
        answer: Answer,
        on_saved: Callable[[int, int], None],
        on_output: Printer,
        calls_again: bool = True,
    ) -> None:
        self.host = host
        self._start_call = call
        self._answer = answer
        self._on_saved = on_saved
        self._on_output = on_output
        self._calls_again = calls_again
        self._nodes: dict[int, RemoteNode] = {}
        self._lock = threading.Lock()
        self._replies: SimpleQueue[dict[str, Any]] = SimpleQueue()  # hello, prepared, refused; {} at the end
        self._commands, self._to_agent = Pipe(duplex=False)
        self._settings: dict[str, Any] = {}  # that the agent is prepared with
        self._is_prepared = False
        self._is_lost = False
        self._ends_at: float | None = None  # once it closes: when the agent must have ended
        self._refusal = ""
        self._call = self._new_call()
        self._mover = threading.Thread(target=self._live, name=f"messages of {host.name}", daemon=True)
        self._mover.start()

    def await_hello(self) -> None:
        """Wait for the agent. Raises Unavailable with the reason if it does not come or has another Shoal."""
        self._check_version(self._await_reply(HELLO_SECONDS)["version"])

    def begin_to_prepare(self, settings: dict[str, Any]) -> None:
        """Hand the agent the run's settings."""
        self._settings = settings
        self.send(do="prepare", **settings, again=False)

    def await_prepared(self) -> None:
        """Wait until the agent has taken them in. Raises Unavailable with the reason if it refuses."""
        self._await_reply(PREPARE_SECONDS)

    def send(self, **message: Any) -> None:
        """Send the agent a message. If it is gone nothing happens here; its members report that."""
        with contextlib.suppress(OSError):
            self._to_agent.send_bytes(json.dumps(message).encode())

    def start(self, rank: int, name: str, waits: bool, **what: Any) -> Member:
        """Start a node on this host; one that `waits` when the host answers again, if it is lost.

        Raises WorkerFailed for another node of a lost host.
        """
        ours, theirs = Pipe()
        process = RemoteProcess(lambda number: self._signal(rank, number))
        incarnation = what["place"]["incarnation"]
        member = Member(rank, f"{name} on {self.host.name}", process, ours, incarnation)
        message = {"do": "start", "rank": rank, **what}
        with self._lock:
            if self._is_lost and not waits:
                raise WorkerFailed(f"{name} cannot be started again: host {self.host.name!r} is lost")
            self._nodes[rank] = RemoteNode(name, member, process, theirs, message)
            member.awaits_host = self._is_lost
            if not self._is_lost:
                self.send(**message)
        return member

    def begin_to_close(self) -> None:
        """Have the agent end, and with it whatever still runs on its host."""
        self._to_agent.close()  # which the thread sees, and closes the agent's input

    def close(self) -> None:
        """Wait for the agent's end; kill the way to it if that takes too long."""
        self.begin_to_close()
        self._mover.join(2 * END_SECONDS)
        if self._mover.is_alive():
            self._call.kill()
            self._mover.join(END_SECONDS)
        self._commands.close()

    def _await_reply(self, seconds: float) -> dict[str, Any]:
        try:
            reply = self._replies.get(timeout=seconds)
        except Empty:
            raise Unavailable(f"host {self.host.name!r}: no answer within {seconds:g} s") from None
        if not reply:
            raise Unavailable(f"host {self.host.name!r}: {self._call.why_it_ended()}")
        if reply["said"] == "refused":
            raise Unavailable(f"host {self.host.name!r}: {reply['why']}")
        self._call.is_up = True
        return reply

    def _check_version(self, theirs: str) -> None:
        own = version()
        if theirs != own:
            raise Unavailable(
                f"host {self.host.name!r} has another Shoal ({theirs}) than this one ({own}); "
                "install the same one there"
            )

    def _signal(self, rank: int, number: int) -> None:
        """Send a node a signal. One that waits for its host ends at once."""
        with self._lock:
            if self._is_lost:
                self._nodes[rank].end(-number)
                return
        self.send(do="signal", rank=rank, signal=number)

    # -- the thread that moves messages --------------------------------------------------------

    def _live(self) -> None:
        """Converse with the agent until `close`; when it is lost and a node waits for it, call it again."""
        try:
            self._converse()
            pause, longest = AGAIN_SECONDS
            while self._calls_again and self._is_prepared and not self._closes_within(pause):
                if not self._is_awaited():
                    continue
                self._call.close()
                with contextlib.suppress(Unavailable, OSError, RuntimeError):  # no ssh, process or thread now
                    self._call = self._new_call()
                    self._converse()
                pause = AGAIN_SECONDS[0] if self._call.is_up else min(2 * pause, longest)
            left = 0.0 if self._ends_at is None else self._ends_at - time.monotonic()
            self._call.close(max(0.0, left) if self._call.is_up else 0.0)
        finally:  # also after an error, as of whoever prints the output
            self._lose_nodes()

    def _is_awaited(self) -> bool:
        """Whether a node waits for its host."""
        with self._lock:
            return any(node.process.is_alive() for node in self._nodes.values())

    def _new_call(self) -> AgentCall:
        name = f"host {self.host.name}"
        return AgentCall(self.host.name, self._start_call, lambda line: self._on_output(name, line))

    def _closes_within(self, seconds: float) -> bool:
        """Wait for so long, and pass over what the agent is told. True at once when `close` is called."""
        deadline = time.monotonic() + seconds
        while self._ends_at is None and (left := deadline - time.monotonic()) > 0:
            if wait([self._commands], left):
                self._pass_command()
        return self._ends_at is not None

    def _converse(self) -> None:
        """Pass messages on, in both directions, until the agent is gone or takes too long to end or greet."""
        lines, pulse_at, must_greet_by = self._call.lines, 0.0, time.monotonic() + HELLO_SECONDS
        with contextlib.suppress(EOFError, OSError):
            while True:
                with self._lock:
                    orders = {n.pipe: rank for rank, n in self._nodes.items() if n.pipe and not self._is_lost}
                commands = [self._commands] if self._ends_at is None else []
                for source in wait([lines.fileno(), *commands, *orders], LOOK_SECONDS):
                    if not isinstance(source, Connection):
                        for message in lines.receive():
                            self._take(**message)
                    elif source is self._commands:
                        self._pass_command()
                    else:
                        self._pass_order(orders[source])
                now = time.monotonic()
                ends_at = self._ends_at or now
                if now > ends_at or (self._is_lost and (now > must_greet_by or ends_at > now)):
                    break
                if commands and now > pulse_at:
                    lines.send(do="pulse")
                    pulse_at = now + PULSE_SECONDS
        self._lose_nodes()

    def _pass_command(self) -> None:
        """Pass on what `send` was given, unless the host is lost. After `close`, have the agent end."""
        try:
            message = json.loads(self._commands.recv_bytes())
        except EOFError:
            self._ends_at = time.monotonic() + END_SECONDS
            self._call.lines.close_writing()
        else:
            if not self._is_lost:
                self._call.lines.send(**message)

    def _pass_order(self, rank: int) -> None:
        node = self._nodes[rank]
        if node.pipe is None:
            return
        try:
            order = json.loads(node.pipe.recv_bytes())
        except (EOFError, OSError):  # the crew has closed its end
            node.hang_up()
        else:
            self._call.lines.send(do="order", rank=rank, order=order)

    def _take(self, said: str, rank: int | None = None, **message: Any) -> None:
        """Handle a message of the agent."""
        if rank is None and self._is_lost:
            self._greet(said, **message)
            return
        if rank is None:
            self._is_prepared = self._is_prepared or said == "prepared"
            self._replies.put({"said": said, **message})
            return
        node = self._nodes[rank]
        if said == "line":
            self._on_output(node.name, message["line"])
        elif said == "ask":
            self._call.lines.send(do="answer", rank=rank, answer=self._answer(message["ask"]))
        elif said == "event":
            if message["event"]["event"] == "saved":
                self._on_saved(rank, message["event"]["step"])
            node.tell_crew(message["event"])
        elif said == "hung up":
            node.hang_up()
        elif said == "ended":
            node.end(message["code"])

    def _greet(self, said: str, version: str = "", why: str = "", **more: Any) -> None:
        """Handle what the agent of a host says that was lost: who is ready starts the nodes that wait."""
        if said == "hello":
            with contextlib.suppress(Unavailable):
                self._check_version(version)
                self._call.lines.send(do="prepare", **self._settings, again=True)
                return
            why = f"it has another Shoal now ({version})"
        if said == "prepared":
            self._call.is_up = True
            with self._lock:
                self._is_lost = False
                for node in self._nodes.values():
                    if node.process.is_alive():
                        node.member.awaits_host = False
                        self._call.lines.send(**node.start)
            self._on_output(f"host {self.host.name}", "answers again")
            return
        if why != self._refusal:  # say it once
            self._on_output(f"host {self.host.name}", f"does not take part: {why}")
        self._refusal = why
        raise EOFError  # it is called again later

    def _lose_nodes(self) -> None:
        """The agent is gone, and its nodes have died with it."""
        with self._lock:
            if self._is_lost:  # it was called again in vain
                return
            self._is_lost = True
            lost = [node for node in self._nodes.values() if node.process.is_alive()]
        why = self._call.why_it_ended() if self._call.is_up and self._ends_at is None else ""
        for node in lost:
            if why:
                node.member.why_lost = f"was lost with host {self.host.name!r} ({why})"
            node.end(-signal.SIGKILL)
        self._replies.put({})
