"""TwoHosts: a run on host 0 that is joined from host 1, both network namespaces. Linux, root only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import shoal
from shoal.studies.shaped_hosts import INTERFACE, ShapedHosts, ip


class TwoHosts:
    """Programs on two hosts, by name: what each printed, and what it said on standard error."""

    def __init__(self, lab: ShapedHosts, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self._printed: dict[str, list[str]] = {}
        self.run_host, self.guest_host = lab.address(0), lab.address(1)

    def start(self, host: int, name: str, *words: str) -> subprocess.Popen[str]:
        """Start `shoal` with these words."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("SHOAL_TOKEN", None)
        command = [sys.executable, "-m", "shoal", *words]
        process = self._lab.start(host, command, environment, self._folder / name)
        lines = self._printed[name] = []
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        return process

    def said(self, name: str) -> str:
        """What a program has written to standard error."""
        return (self._folder / name).read_text()

    def printed(self, name: str) -> str:
        """What a program has written to standard output."""
        return "".join(self._printed[name])

    def invitation(self, run: subprocess.Popen[str]) -> list[str]:
        """What the run says is to be typed elsewhere."""
        until(lambda: "to join" in self.said("run") or run.poll() is not None)
        found = re.search("to join: shoal (.*)  # copy", self.said("run"))
        assert found is not None, self.said("run")
        return found[1].split()

    def workers(self, port: str) -> list[int]:
        """The processes of the workers: the keeper, which listens, has them as siblings."""
        (keeper,) = {int(pid) for pid in re.findall(r"pid=(\d+)", self._sockets("-ltnp", port))}
        others = [pid for pid in self._lab.pids(0) if parent(pid) == parent(keeper)]
        return [pid for pid in others if pid != keeper]

    def connections(self, port: str) -> int:
        """Those from host 1 to the keeper."""
        return self._sockets("-tn", port).count(self.guest_host)

    def cut(self) -> None:
        """Take the link of host 1 down."""
        ip("-n", self._lab._host(1), "link", "set", INTERFACE, "down")

    def vanish(self) -> None:
        """Host 1 is gone: nothing that it would say as its processes end comes out."""
        self.cut()
        for pid in self._lab.pids(1):
            os.kill(pid, 9)

    def _sockets(self, what: str, port: str) -> str:
        inside = ["ip", "netns", "exec", self._lab._host(0), "ss", "-H", what, f"sport = :{port}"]
        return subprocess.run(inside, capture_output=True, text=True, check=True).stdout


def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    lines.extend(process.stdout)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return -1


def until(condition: Callable[[], bool], seconds: float = 150.0) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
