"""A volunteer's machine joins a run of another host; the hosts are network namespaces.

The workers of the run are stopped until the newcomer is connected, so that it comes while there is work.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shoal
from shoal.studies.shaped_hosts import ShapedHosts, obstacle

# tests/runs/test_joining.py has one who joins on this host
pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.usefixtures("warm_programs")]

SAMPLES, EPOCHS = 1437, 20
RUN = f"compare --task digits --strategies bmuf -n 2 --max-workers 3 --epochs {EPOCHS} --threads 1"


class TwoHosts:
    """A run on host 0, and `shoal join` on host 1."""

    def __init__(self, lab: ShapedHosts, folder: Path) -> None:
        self._lab, self._folder = lab, folder

    def start(self, host: int, name: str, *words: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("SHOAL_TOKEN", None)
        command = [sys.executable, "-m", "shoal", *words]
        return self._lab.start(host, command, environment, self._folder / name)

    def said(self, name: str) -> str:
        return (self._folder / name).read_text()

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
        return self._sockets("-tn", port).count(self._lab.address(1))

    def _sockets(self, what: str, port: str) -> str:
        inside = ["ip", "netns", "exec", self._lab._host(0), "ss", "-H", what, f"sport = :{port}"]
        return subprocess.run(inside, capture_output=True, text=True, check=True).stdout


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return -1


def until(condition, seconds=150.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def hosts(tmp_path):
    if (why := obstacle()) is not None:
        pytest.skip(why)
    try:
        with ShapedHosts(2, 12.5e6) as lab:
            yield lab, TwoHosts(lab, tmp_path)
    except RuntimeError as refused:  # root in a container may lack the right
        pytest.skip(str(refused))


def test_a_worker_of_another_host_takes_part_and_every_sample_counts_once(hosts, tmp_path):
    pytest.importorskip("cryptography")
    lab, two = hosts
    record, here = tmp_path / "run.json", f"--transport grpc --patience 300 --listen {lab.address(0)}"
    run = two.start(0, "run", *RUN.split(), *here.split(), "--json", str(record), "--runs", "none")
    join, address, *credentials = two.invitation(run)
    port = address.rpartition(":")[2]
    stopped = two.workers(port)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    joiner = two.start(1, "joiner", join, address, *credentials, "--threads", "1")
    until(lambda: two.connections(port) > 1 or joiner.poll() is not None)  # the launcher's, and the worker's
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert (run.wait(150), joiner.wait(150)) == (0, 0), two.said("run") + two.said("joiner")
    nodes = {node["rank"]: node["samples"] for node in json.loads(record.read_text())["runs"][0]["nodes"]}
    assert nodes.keys() == {0, 1, 2} and min(nodes.values()) > 0
    assert sum(nodes.values()) == EPOCHS * SAMPLES
    assert f"worker 2 joins from {lab.address(1)}" in two.said("run")
