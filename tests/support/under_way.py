"""A command of Shoal under way in a session and a temporary folder of its own, to be stopped by signals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import shoal

START_SECONDS = 90.0  # for torch to be imported in each process, on a busy machine
GONE_SECONDS = 10.0  # for a fork server to see that its launcher is gone


class UnderWay:
    """`python -m shoal LINE`, in `folder`, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, line: str, variables: Mapping[str, str] | None = None) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="way-"))  # short: the path of a socket lies in it
        ours = {"TMPDIR": str(self.temporary), "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *line.split()],
            cwd=folder,
            env={**os.environ, **ours, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()
        self._reader.join()
        shutil.rmtree(self.temporary)

    def await_that(self, happened: Callable[[], object]) -> None:
        """Wait until this is true."""
        deadline = time.monotonic() + START_SECONDS
        while not happened():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"exit code {self.process.returncode}\n{self.printed}")
            time.sleep(0.02)

    def await_line(self, text: str) -> None:
        """Wait until a line holds this."""
        self.await_that(lambda: text in self.printed)

    def end(self, seconds: float) -> int:
        """The exit code, within so many seconds."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after {seconds:g} s\n{self.printed}")
        self._reader.join()
        return code

    @property
    def printed(self) -> str:
        return "".join(self.lines)

    def processes(self) -> list[int]:
        """All processes of the command: those that have its temporary folder."""
        mark, found = f"TMPDIR={self.temporary}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found

    def left(self) -> list[str]:
        """What the command has left: files, but for torch's own cache, and processes after a moment."""
        deadline = time.monotonic() + GONE_SECONDS
        while (pids := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor")]
        return [*map(str, pids), *files]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
