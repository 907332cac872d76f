"""AgentActor: runs the agent of a Ray node; ActorProcess: the launcher's side, which looks like a process.

Messages between launcher and agent pass through calls of the actor, as small byte strings. Tensors never do:
the nodes of the run connect to each other.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.exceptions import RayError

READ_BYTES = 1 << 16
READ_SECONDS = 1.0
LOST = 255
"""The exit code of an agent whose actor is gone, as ssh has it for a lost connection."""


class AgentActor:
    """The actor: a subprocess, its standard input and what it prints."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.agent"],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None and self._process.stderr is not None
        self._input = self._process.stdin
        self._open = [self._process.stdout, self._process.stderr]

    def write(self, data: bytes) -> None:
        """Write to the agent's standard input; nothing means its end."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `read` tells
            if not data:
                self._input.close()
            while data:
                data = data[self._input.write(data) or 0 :]

    def read(self) -> tuple[bytes, bytes, int | None]:
        """What the agent has printed on both streams since the last call, and its exit code at the end."""
        said = {id(stream): b"" for stream in (self._process.stdout, self._process.stderr)}
        ready, _, _ = select.select(self._open, (), (), READ_SECONDS)
        for stream in ready:
            data = os.read(stream.fileno(), READ_BYTES)
            said[id(stream)] = data
            if not data:
                self._open.remove(stream)
        code = None if self._open else self._process.wait()
        return said[id(self._process.stdout)], said[id(self._process.stderr)], code


class ActorProcess:
    """The agent behind an actor, as a process with three pipes. Threads pass on what is written and read."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.returncode: int | None = None
        self._over = threading.Event()
        reading, self._out = os.pipe()
        errors, self._err = os.pipe()
        self._in, writing = os.pipe()
        self.stdin = os.fdopen(writing, "w")
        self.stdout = os.fdopen(reading)
        self.stderr = os.fdopen(errors, errors="replace")
        for work in (self._feed, self._drain):
            threading.Thread(target=work, name="agent on ray", daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the agent's end. Raises subprocess.TimeoutExpired."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("agent on ray", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        """End the actor, and with it the agent, which then has no input."""
        ray.kill(self._actor)

    def _feed(self) -> None:
        with contextlib.suppress(RayError), os.fdopen(self._in, "rb", buffering=0) as source:
            while data := source.read(READ_BYTES):
                ray.get(self._actor.write.remote(data))
            ray.get(self._actor.write.remote(b""))

    def _drain(self) -> None:
        with os.fdopen(self._out, "wb", buffering=0) as out, os.fdopen(self._err, "wb", buffering=0) as err:
            try:
                code = None
                while code is None:
                    said, complained, code = ray.get(self._actor.read.remote())
                    for stream, data in ((out, said), (err, complained)):
                        _write(stream, data)
            except RayError as problem:
                code = LOST
                _write(err, f"{str(problem).splitlines()[0]}\n".encode())
            self.returncode = code
        self._over.set()


def _write(stream: Any, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        while data:
            data = data[stream.write(data) :]
