"""Programs whose Python has imported torch and shoal before they start: seconds less for each process.

A server, forked from the fork server, forks a process for every `python`, `shoal` or `torchrun` that is
started while a test has `warm_programs`, and for those that these start in turn. They are `warm_client`.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import tempfile
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from forked import CONTEXT, ensure_fork_server
from interpreter import COLD_PYTHON
from warm_server import COMMANDS, serve

STARTED_WARM = sys.executable != COLD_PYTHON
"""Whether this process is such a program itself, as those of pytest-xdist are."""

PROGRAM = """#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
from warm_client import main
main({name!r}, {address!r})
"""


class WarmPrograms:
    """The programs of this process's tests, in a folder, and the server that they turn to."""

    def __init__(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="warm-")
        atexit.register(folder.cleanup)
        self.folder = Path(folder.name)
        self.files: set[int] = set()  # what this process has open for the server
        self._server: Any = None
        self._address = str(self.folder / "socket")
        for name in ("python", "python3", *COMMANDS):
            told = {"python": sys.executable, "folder": str(Path(__file__).parent), "address": self._address}
            program = self.folder / name
            program.write_text(PROGRAM.format(name=name, **told))
            program.chmod(0o755)

    @property
    def python(self) -> str:
        """What stands for sys.executable."""
        return str(self.folder / "python")

    @property
    def pid(self) -> int | None:
        """The server's process id once it runs."""
        return None if self._server is None else self._server.pid

    def start(self) -> None:
        """Start the server, unless it runs."""
        if self._server is not None and self._server.is_alive():
            return
        ensure_fork_server()
        before = own_files()
        Path(self._address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(16)
            self._server = CONTEXT.Process(target=serve, args=(listener, self.python), daemon=True)
            self._server.start()
        self.files = own_files() - before


def own_files() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208


@cache
def programs() -> WarmPrograms:
    """Those of this process."""
    return WarmPrograms()


def fork_server_pid() -> int | None:
    """The process that forks, once it runs. Where it has started warm, our child is its stand-in."""
    child: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return _parent_of_forked(child) if STARTED_WARM and child is not None else child


@cache
def _parent_of_forked(_: int) -> int:
    """The parent of a process that the fork server makes."""
    reading, writing = CONTEXT.Pipe(duplex=False)
    with reading, writing:
        process = CONTEXT.Process(target=_tell_parent, args=(writing,))
        process.start()
        found: int = reading.recv()
        process.join()
    return found


def _tell_parent(writing: Connection) -> None:
    writing.send(os.getppid())


@pytest.fixture
def warm_programs(monkeypatch: pytest.MonkeyPatch) -> WarmPrograms:
    """Let `python`, `shoal`, `torchrun` and sys.executable be programs that start at once."""
    found = programs()
    found.start()
    monkeypatch.setenv("PATH", str(found.folder), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", found.python)
    return found
