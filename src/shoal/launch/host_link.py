"""HostLink: the launcher's connection to the agent of one host, through ssh."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from queue import Empty, SimpleQueue
from typing import IO, Any, Protocol

from shoal.core.errors import Unavailable, WorkerFailed
from shoal.launch.agent import PULSE_SECONDS
from shoal.launch.hosts import Host
from shoal.launch.member import Member
from shoal.launch.message_lines import MessageLines

CONNECT_SECONDS = 10
"""How long ssh tries to reach a host."""

HELLO_SECONDS = 60.0
"""How long an agent may take to start once ssh was called."""

ALIVE_SECONDS = 10
"""How often ssh asks whether a host is there."""

END_SECONDS = 5.0
"""How long an agent may take to end its nodes and itself before ssh is killed."""

LAST_LINES = 20

SSH_FAILED = 255
"""The exit code of an ssh that could not connect, or lost its connection."""

NO_SUCH_PROGRAM = (126, 127)
"""The exit codes of a shell that finds no program to run."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]
Printer = Callable[[str, str], None]


class AgentProcess(Protocol):
    """The process through which an agent is reached: ssh's, or what stands in for it."""

    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None
    returncode: Any

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


def start_command(command: Sequence[str]) -> AgentProcess:
    """Start ssh, or what stands in for it, in a session of its own."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
    except FileNotFoundError:
        raise Unavailable(
            f"--hosts needs the program {command[0]!r}; install OpenSSH's client, or name another with --ssh"
        ) from None


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
    """A node on another host: its member of the crew, and our end of that member's connection."""

    name: str
    member: Member
    process: RemoteProcess
    pipe: Connection | None

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


class HostLink:
    """Starts the agent of a host and passes messages between it and the members of a crew.

    A thread moves all messages: it reads the agent's, and the orders that the crew writes to its members'
    connections. `answer` answers a node's questions to the store; `on_saved` hears of every checkpoint, by
    the node's rank and step. `start` runs the command by which the agent is reached.
    """

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        *,
        answer: Answer,
        on_saved: Callable[[int, int], None],
        on_output: Printer,
        start: Callable[[Sequence[str]], AgentProcess] = start_command,
    ) -> None:
        self.host = host
        self._answer = answer
        self._on_saved = on_saved
        self._on_output = on_output
        self._nodes: dict[int, RemoteNode] = {}
        self._lock = threading.Lock()
        self._complaints: deque[str] = deque(maxlen=LAST_LINES)
        self._replies: SimpleQueue[dict[str, Any]] = SimpleQueue()  # hello, prepared, refused; {} at the end
        self._commands, self._to_agent = Pipe(duplex=False)
        self._is_up = False
        self._is_over = False
        self._process = start(command)
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as theirs, self._process.stdout as ours:
            self._lines = MessageLines(os.dup(ours.fileno()), os.dup(theirs.fileno()))
        self._errors = threading.Thread(target=self._listen, name=f"errors of {host.name}", daemon=True)
        self._mover = threading.Thread(target=self._move, name=f"messages of {host.name}", daemon=True)
        self._errors.start()
        self._mover.start()

    def await_reply(self, seconds: float) -> dict[str, Any]:
        """The agent's next reply. Raises Unavailable with the reason if there is none, or it refuses."""
        try:
            reply = self._replies.get(timeout=seconds)
        except Empty:
            raise Unavailable(f"host {self.host.name!r}: no answer within {seconds:g} s") from None
        if not reply:
            raise Unavailable(f"host {self.host.name!r}: {self._why()}")
        if reply["said"] == "refused":
            raise Unavailable(f"host {self.host.name!r}: {reply['why']}")
        self._is_up = True
        return reply

    def send(self, **message: Any) -> None:
        """Send the agent a message. If it is gone nothing happens here; its members report that."""
        with contextlib.suppress(OSError):
            self._to_agent.send_bytes(json.dumps(message).encode())

    def start(self, rank: int, name: str, place: dict[str, Any]) -> Member:
        """Start a node on this host. Raises WorkerFailed if the host is lost."""
        ours, theirs = Pipe()
        process = RemoteProcess(lambda number: self.send(do="signal", rank=rank, signal=number))
        member = Member(rank, f"{name} on {self.host.name}", process, ours, place["incarnation"])
        with self._lock:
            if self._is_over:
                raise WorkerFailed(f"{name} cannot be started again: host {self.host.name!r} is lost")
            self._nodes[rank] = RemoteNode(name, member, process, theirs)
        self.send(do="start", rank=rank, place=place)
        return member

    def close(self) -> None:
        """End the agent, and with it whatever still runs on its host."""
        self._to_agent.close()  # which the thread sees, and closes the agent's input
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._mover.join(END_SECONDS)
        self._errors.join(END_SECONDS)
        self._lines.close()
        self._commands.close()

    def _move(self) -> None:
        """Pass messages on, in both directions, until the agent is gone."""
        pulse_at = 0.0
        commands = [self._commands]
        try:
            while True:
                with self._lock:
                    orders = {n.pipe: rank for rank, n in self._nodes.items() if n.pipe is not None}
                for source in wait([self._lines.fileno(), *commands, *orders], PULSE_SECONDS):
                    if not isinstance(source, Connection):
                        for message in self._lines.receive():
                            self._take(**message)
                    elif source is self._commands:
                        commands = commands if self._pass_command() else []
                    else:
                        self._pass_order(orders[source])
                if commands and time.monotonic() > pulse_at:
                    self._lines.send(do="pulse")
                    pulse_at = time.monotonic() + PULSE_SECONDS
        except (EOFError, OSError):
            self._lose_all(expected=not commands)

    def _pass_command(self) -> bool:
        """Pass on what `send` was given. False after `close`: then the agent is to end."""
        try:
            self._lines.send(**json.loads(self._commands.recv_bytes()))
        except EOFError:
            self._lines.close_writing()
            return False
        return True

    def _pass_order(self, rank: int) -> None:
        node = self._nodes[rank]
        if node.pipe is None:
            return
        try:
            order = json.loads(node.pipe.recv_bytes())
        except (EOFError, OSError):  # the crew has closed its end
            node.hang_up()
        else:
            self._lines.send(do="order", rank=rank, order=order)

    def _take(self, said: str, rank: int | None = None, **message: Any) -> None:
        """Handle a message of the agent."""
        if rank is None:
            self._replies.put({"said": said, **message})
            return
        node = self._nodes[rank]
        if said == "line":
            self._on_output(node.name, message["line"])
        elif said == "ask":
            self._lines.send(do="answer", rank=rank, answer=self._answer(message["ask"]))
        elif said == "event":
            if message["event"]["event"] == "saved":
                self._on_saved(rank, message["event"]["step"])
            node.tell_crew(message["event"])
        elif said == "hung up":
            node.hang_up()
        elif said == "ended":
            node.process.has_ended(message["code"])
            node.hang_up()

    def _lose_all(self, *, expected: bool) -> None:
        """The agent is gone, and its nodes have died with it."""
        with self._lock:
            self._is_over = True
        why = "" if expected or not self._is_up else self._why()
        for node in self._nodes.values():
            if node.process.is_alive():
                node.member.why_lost = f"was lost with host {self.host.name!r} ({why})" if why else ""
                node.process.has_ended(-signal.SIGKILL)
            node.hang_up()
        self._replies.put({})

    def _listen(self) -> None:
        """Keep what ssh and the agent print as errors; show it once the agent runs."""
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for line in errors:
                self._complaints.append(line.rstrip())
                if self._is_up:
                    self._on_output(f"host {self.host.name}", line.rstrip())

    def _why(self) -> str:
        """Why the agent is gone, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._errors.join(END_SECONDS)
        said = [line for line in self._complaints if line]
        return explain(self._process.returncode, said, self.host.name, self._is_up)


def explain(code: int | None, complaints: Sequence[str], host: str, was_up: bool = False) -> str:
    """What a person can do about an ssh that ended with this exit code after printing these lines."""
    text, last = "\n".join(complaints), complaints[-1] if complaints else "nothing"
    if was_up:
        return f"its connection ended with exit code {code} and said: {last}"
    if "Host key verification failed" in text:
        return f"ssh does not know its host key, or the key has changed; connect once by hand: ssh {host}"
    if "Permission denied" in text and code == SSH_FAILED:
        return f"ssh may not log in without a password; set up a key: ssh-copy-id {host}"
    if code == SSH_FAILED:
        return f"ssh cannot reach it: {last}"
    if code in NO_SUCH_PROGRAM:
        return f"there is no such Python ({last}); name the one there with --remote-python"
    if "No module named" in text:
        return f"its Python has no shoal ({last}); install it there, or name another with --remote-python"
    return f"the agent ended with exit code {code} and said: {last}"


def ssh_command(ssh: Sequence[str], host: str, python: str, patience: float) -> list[str]:
    """The command that starts the agent on a host. Options of the user's own command take precedence.

    ssh gives up a host that does not answer for `patience` seconds.
    """
    unanswered = math.ceil(patience / ALIVE_SECONDS)
    alive = (f"ServerAliveInterval={ALIVE_SECONDS}", f"ServerAliveCountMax={unanswered}")
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", *alive)
    settings = [word for option in options for word in ("-o", option)]
    return [*ssh, *settings, "-T", "--", host, f"exec {shlex.quote(python)} -m shoal.launch.agent"]
