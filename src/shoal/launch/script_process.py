"""ScriptProcess: a process of its own for one node of a run: it runs a user's script, or keeps the roster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from types import MappingProxyType
from typing import Any

from shoal.launch.huge_pages import with_huge_pages

VARIABLE = "SHOAL_PLACE"
"""The environment variable from which a node reads its place in the run, the fields of Place as JSON."""

SCRIPT = "shoal.api.script"
"""The module that runs a user's script, which is its first argument."""

KEEPER = "shoal.launch.keeper_process"
"""The module that keeps the roster of a run."""

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class ScriptProcess:
    """A process that runs a module of ours. Its output is passed on line by line."""

    def __init__(self, process: subprocess.Popen[str], on_line: Callable[[str], None]) -> None:
        self._process = process
        self.on_line = on_line  # what a spare prints is another node's from when it becomes that
        self._reader = threading.Thread(target=self._read, name=f"output of {process.pid}", daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        words: Sequence[str],
        place: Mapping[str, Any],
        on_line: Callable[[str], None],
        pipes: Sequence[str] = ("control",),
        inherited: Sequence[int] = (),
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> tuple[ScriptProcess, list[Connection]]:
        """Start the node at `place`, given as the fields of Place. Returns the process and its pipes.

        `words` are a module and its arguments. `pipes` names the fields of Place that hold the file
        descriptor of a pipe to us. The process also gets the file descriptors in `inherited`, and these
        environment variables.
        """
        ours, theirs = zip(*(Pipe() for _ in pipes), strict=True)
        descriptors = [end.fileno() for end in theirs]
        place = {**place, **dict(zip(pipes, descriptors, strict=True))}
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=with_huge_pages(
                {**os.environ, **variables, "PYTHONUNBUFFERED": "1", VARIABLE: json.dumps(place)}
            ),
            pass_fds=[*descriptors, *inherited],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
        for end in theirs:
            end.close()
        return cls(process, on_line), list(ours)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def is_read(self) -> bool:
        """Whether all its output has been passed on."""
        return not self._reader.is_alive()

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended and its output is read, each at most `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return
        self._reader.join(timeout)

    def close(self) -> None:
        """Do nothing: the reader has closed the pipe."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.on_line(line.rstrip("\n"))
