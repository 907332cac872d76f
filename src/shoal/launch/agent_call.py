"""AgentCall: one call of a host's agent, through ssh: its process, and what it says and complains of."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from shoal.core.errors import Unavailable
from shoal.launch.message_lines import MessageLines

CONNECT_SECONDS = 10
"""How long ssh tries to reach a host."""

ALIVE_SECONDS = 10
"""How often ssh asks whether a host is there."""

END_SECONDS = 5.0
"""How long an agent may take to end its nodes and itself before ssh is killed."""

LAST_LINES = 20

SSH_FAILED = 255
"""The exit code of an ssh that could not connect, or lost its connection."""

NO_SUCH_PROGRAM = (126, 127)
"""The exit codes of a shell that finds no program to run."""


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


Start = Callable[[], AgentProcess]


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


class AgentCall:
    """A conversation with the agent of a host, on `lines`.

    `on_line` hears what ssh and the agent print as errors once `is_up` is set; before, that says why the host
    cannot be reached.
    """

    def __init__(self, host: str, start: Start, on_line: Callable[[str], None]) -> None:
        self.is_up = False
        self._host = host
        self._on_line = on_line
        self._complaints: deque[str] = deque(maxlen=LAST_LINES)
        self._process = start()
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as theirs, self._process.stdout as ours:
            self.lines = MessageLines(os.dup(ours.fileno()), os.dup(theirs.fileno()))
        self._errors = threading.Thread(target=self._listen, name=f"errors of {host}", daemon=True)
        self._errors.start()

    def why_it_ended(self) -> str:
        """Why the agent is gone, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._errors.join(END_SECONDS)
        said = [line for line in self._complaints if line]
        return explain(self._process.returncode, said, self._host, self.is_up)

    def kill(self) -> None:
        """End the process through which the agent is reached."""
        self._process.kill()

    def close(self, patience: float = END_SECONDS) -> None:
        """End the agent, in so many seconds by itself, and with it whatever still runs on its host."""
        self.lines.close_writing()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.join(END_SECONDS)
        self.lines.close()

    def _listen(self) -> None:
        """Keep what ssh and the agent print as errors; show it once the agent runs."""
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for line in errors:
                self._complaints.append(line.rstrip())
                if self.is_up:
                    self._on_line(line.rstrip())


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
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ControlPersist=no", *alive)
    settings = [word for option in options for word in ("-o", option)]
    return [*ssh, *settings, "-T", "--", host, f"exec {shlex.quote(python)} -m shoal.launch.agent"]
