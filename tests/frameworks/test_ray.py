"""Shoal on a real Ray cluster of two node processes on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs Ray; install with: pip install 'shoal[ray]'")

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "tests/launch/slurm_loop.py"

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes: the head with three cores, another with two."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    look = services.get_node

    def patient(*args: Any, **options: Any) -> Any:
        """Ray gives a node 30 s to start, which is too little on a machine with much else to do."""
        deadline = time.monotonic() + 300
        while True:
            try:
                return look(*args, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(services, "get_node", patient)
        running = Cluster()
        try:
            start_nodes(running)
            patch.setenv("RAY_ADDRESS", running.address)
            yield running
        finally:
            running.shutdown()


def start_nodes(cluster: Any) -> None:
    """Start the head and another node; skip where Ray itself cannot, which says nothing of Shoal."""
    try:
        cluster.add_node(num_cpus=3, include_dashboard=False)
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
    except Exception as why:
        pytest.skip(f"Ray cannot start a cluster on this machine: {why}")


class LaunchedRun:
    """A `shoal run --on ray`, whose output can be waited for."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.log = folder / "run.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "run", "--on", "ray", "--quiet", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def soon(self, pattern: str, seconds: float = 400.0) -> str:
        """The log, once it has so many matches; a bound for a machine with much else to do."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, text := self.log.read_text(), re.DOTALL):
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        return text


def nodes_of(script: Path, folder: Path) -> list[int]:
    """The processes that run the script as a node of the run in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
                if "shoal.api.script" in words and str(folder) in " ".join(words):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def test_four_workers_on_two_ray_nodes_go_on_when_one_is_killed(cluster, tmp_path):
    enough = tmp_path / "enough"
    run = LaunchedRun(tmp_path, "-n", "4", "--strategy", "asgd", str(LOOP), "--until", str(enough))
    try:
        run.soon("(worker . . worker . is at 20.*){4}")
        killed = next(p for p in nodes_of(LOOP, tmp_path) if is_worker(p, 3))
        os.kill(killed, signal.SIGKILL)
        run.soon("worker 3 on .* was ended by SIGKILL; the other 3 go on")
        enough.touch()
        assert run.process.wait(400) == 0, run.log.read_text()
    finally:
        run.process.kill()
        run.process.wait()
    done = re.findall(r"worker (\d) of 4 has (\S+)", run.log.read_text())
    assert sorted(rank for rank, _ in done) == ["0", "1", "2"]
    assert len({model for _, model in done}) == 1
    assert nodes_of(LOOP, tmp_path) == []  # the agents and the nodes are gone


def is_worker(process: int, rank: int) -> bool:
    place = Path(f"/proc/{process}/environ").read_bytes()
    return f'"rank": {rank},'.encode() in place


# Drivers of Ray are processes of their own: a driver leaves files open, and sets variables.

CROWDED = """
from shoal.ray import ray_hosts as module

module.PATIENCE = 1.0
with module.ray_hosts(8, 1):
    pass
"""


def test_too_little_room_is_refused_in_a_sentence(cluster):
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, check=False)
    assert "no room for 9 processes with 1 cores each within 1 s; it has 5 cores in all" in done.stderr


@pytest.mark.parametrize(("strategy", "processes"), [("bmuf", 3), ("asgd", 4)])
def test_ray_train_s_torch_trainer_takes_one_other_line(cluster, tmp_path, strategy, processes):
    line = [sys.executable, str(Path(__file__).with_name("ray_trainer.py"))]
    line += [strategy, str(processes), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(tmp_path.glob("*-3"))
    assert [path.name for path in found] == ["0-3", "1-3", "2-3"]
    assert len({path.read_text() for path in found}) == 1  # one model


def test_a_misspelt_strategy_is_refused_where_the_trainer_is_made():
    from shoal.ray import ShoalConfig

    with pytest.raises(ValueError, match="bmuf"):
        ShoalConfig(strategy="bmfu")


def test_the_options_of_a_strategy_come_in_its_word_or_beside_it():
    from shoal.ray import ShoalConfig

    place = ShoalConfig(strategy="local:period=8", strategy_options={"warmup": 2}).place(0, 2)
    assert (place.strategy, place.strategy_options) == ("local", {"period": "8", "warmup": "2"})
    with pytest.raises(ValueError, match="'local:period=8' has 'period' already"):
        ShoalConfig(strategy="local:period=8", strategy_options={"period": 4})
