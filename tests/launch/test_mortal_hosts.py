"""Workers, the keeper and whole hosts of a run on several hosts are lost, and come back.

The hosts are agents on this machine, as in test_host_link.py; over a real sshd they are in test_ssh_hosts.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from sampling import mostly_soak
from scripts import final_weights
from shoal.api.script import run_script
from shoal.core.errors import Interrupted, WorkerFailed
from shoal.launch import agent as agent_module
from shoal.launch.environment import Place
from shoal.launch.hosts import HostList, parse_hosts
from shoal.strategies import STRATEGIES

pytest.importorskip("grpc", reason="needs grpcio: pip install 'shoal[grpc]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'shoal[hosts]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOP = Path(__file__).parents[1] / "api" / "mortal_loop.py"
SAMPLES, EPOCHS = 60, 4

SSH = """
import os, sys
from pathlib import Path
agents, host = Path(os.environ["AGENTS"]), sys.argv[-2]
if (agents / "down").exists():
    sys.exit("No route to host")
(agents / host).write_text(str(os.getpid()))
os.execvp("sh", ["sh", "-c", sys.argv[-1]])
"""
"""An `ssh` that knows this host alone, by any name, and writes down which process the agent of each is."""


@pytest.fixture(autouse=True)
def agents(monkeypatch, tmp_path) -> Path:
    """The agents find the Shoal under test, whatever is installed; the folder of their process ids."""
    monkeypatch.setenv("PYTHONPATH", str(Path(agent_module.__file__).parents[2]))
    monkeypatch.setenv("AGENTS", str(tmp_path))
    monkeypatch.setattr("shoal.launch.hosts._check_reachable", lambda host: None)  # they are on loopback
    return tmp_path


def run(
    *arguments: str,
    strategy: str | None,
    on_progress=lambda event: None,
    servers_on: str = "",
    min_workers: int = 1,
    **place,
) -> list[str]:
    """What each of three workers printed, of which the first two are on one host."""
    hosts = parse_hosts("here=127.0.0.1:2,there=127.0.0.2:1")
    lines: dict[str, list[str]] = {}
    run_script(
        LOOP,
        ["--epochs", str(EPOCHS), *arguments],
        workers=3,
        strategy=None if strategy is None else STRATEGIES.make(strategy),
        place=Place(strategy=strategy, transport="grpc", **place),
        on_progress=on_progress,
        on_output=lambda name, line: lines.setdefault(name, []).append(line),
        hosts=HostList(hosts, ssh=(sys.executable, "-c", SSH), servers_on=servers_on),
        min_workers=min_workers,
    )
    return ["\n".join(lines.get(f"worker {rank}", ())) for rank in range(3)]


class Loss:
    """Kills the agent of a host, and so its nodes, when a worker on the second one has done two steps."""

    def __init__(self, agents: Path, host: str = "there") -> None:
        self.happened = False
        self._agents, self._host = agents, host

    def __call__(self, event) -> None:
        if event["rank"] == 2 and event["role"] == "worker" and event["step"] > 2 and not self.happened:
            self.happened = True
            os.killpg(int((self._agents / self._host).read_text()), signal.SIGKILL)  # a session of its own


def counts(printed: list[str]) -> torch.Tensor:
    """How often each sample is in the model with which all end."""
    found = [final_weights(lines) for lines in printed]
    assert all(own.equal(found[0]) for own in found)
    return found[0]


BOTH = pytest.mark.parametrize(
    "strategy",
    [pytest.param(None, id="averages"), pytest.param("asgd", id="server", marks=pytest.mark.soak)],
)


@BOTH
def test_a_killed_worker_is_started_again_on_its_host_and_every_sample_counts_once(strategy, tmp_path):
    printed = run("--returns", str(tmp_path), "--kill", "2:3", strategy=strategy)
    assert torch.equal(counts(printed), torch.full((SAMPLES,), float(EPOCHS)))
    assert "goes on from" in printed[2]


@BOTH
def test_a_host_that_is_lost_is_called_again_and_its_worker_comes_back(strategy, tmp_path, agents, caplog):
    hurry, lose = tmp_path / "hurry", Loss(agents)

    def watch(event) -> None:
        lose(event)
        if event.get("fault") == "worker 2 on there is back":
            hurry.touch()

    with caplog.at_level(logging.WARNING, "shoal"):
        printed = run("--pause", "0.5", "--hurry", str(hurry), strategy=strategy, on_progress=watch)
    assert re.search(
        r"worker 2 on there was lost with host 'there' \(its connection ended with exit code -9.*\); "
        "the other 2 go on, and it is started again",
        caplog.text,
    )
    assert torch.equal(counts(printed), torch.full((SAMPLES,), float(EPOCHS)))
    assert "goes on from" in printed[2]


@pytest.mark.parametrize(
    ("strategy", "host"),
    mostly_soak([("dpsgd", "here"), ("gossip", "there"), ("gossip", "here"), ("sgp", "there")], few=1),
)
def test_neighbours_on_a_lost_host_come_back_and_do_the_rest_of_their_shares(
    strategy, host, tmp_path, agents
):
    """Among neighbours no host is different from the others: worker 0 may be lost as any."""
    lose, lost = Loss(agents, host), {2} if host == "there" else {0, 1}

    def watch(event) -> None:
        lose(event)
        for rank in lost if lose.happened else ():
            (tmp_path / f"died-{rank}").touch()  # the others wait for them to train again

    printed = run("--tell", "--returns", str(tmp_path), strategy=strategy, on_progress=watch)
    assert all(("goes on from" in lines) == (rank in lost) for rank, lines in enumerate(printed))
    found = [final_weights(lines) for lines in printed]
    assert all(own.equal(found[0]) for own in found)
    reads = [line for lines in printed for line in lines.splitlines() if line.startswith("read ")]
    counts = Counter(sample for line in reads for sample in json.loads(line.removeprefix("read ")))
    missing = sum(max(0, EPOCHS - counts[sample]) for sample in range(SAMPLES))
    assert missing <= 4 * len(lost)  # of a last step that others knew, and whose line was lost with the host


@pytest.mark.soak
def test_with_min_workers_the_others_wait_for_a_lost_host(agents, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        printed = run("--pause", "0.2", strategy=None, on_progress=Loss(agents), min_workers=3)
    assert torch.equal(counts(printed), torch.full((SAMPLES,), float(EPOCHS)))
    assert "goes on from" in printed[2]
    assert "training waits: it needs 3 workers, and 2 are there" in caplog.text


def test_the_others_do_the_batches_of_a_host_that_stays_away(agents):
    lose = Loss(agents)

    def watch(event) -> None:
        lose(event)
        if lose.happened:
            (agents / "down").touch()

    printed = run("--pause", "0.2", strategy=None, on_progress=watch)
    found = [final_weights(lines) for lines in printed[:2]]
    assert all(torch.equal(own, torch.full((SAMPLES,), float(EPOCHS))) for own in found)
    assert "weights" not in printed[2]


@pytest.mark.soak
def test_a_stop_does_not_wait_for_a_lost_host_and_no_step_is_saved_without_it(
    agents, crews, tmp_path, caplog
):
    lose, saved, stopped = Loss(agents), tmp_path / "saved", []

    def watch(event) -> None:
        lose(event)
        if lose.happened:
            (agents / "down").touch()
        if crews[0].members[2].awaits_host and event["step"] > 12 and not stopped:
            stopped.append(time.monotonic())
            crews[0].ask_to_stop()

    saves = {"checkpoint": str(saved), "every": 1}
    with pytest.raises(Interrupted), caplog.at_level(logging.WARNING, "shoal"):
        run("--pause", "0.3", "--epochs", "100", strategy=None, on_progress=watch, **saves)
    assert time.monotonic() - stopped[0] < 60.0
    steps = {int(folder.name.split("-")[1]) for folder in saved.glob("step-*")}
    assert max(steps) < 8 and len(steps) < 8
    assert "no checkpoint is written while worker 2 is away" in caplog.text


@pytest.mark.soak
def test_a_killed_keeper_is_started_again_on_its_host(crews, tmp_path, caplog):
    hurry, killed = tmp_path / "hurry", []

    def watch(event) -> None:
        keeper = crews[0].members[-1]
        if event["step"] > 2 and not killed:
            killed.append(keeper)
            keeper.process.kill()
        if killed and keeper is not killed[0]:
            hurry.touch()

    with caplog.at_level(logging.WARNING, "shoal"):
        printed = run("--pause", "0.2", "--hurry", str(hurry), strategy=None, on_progress=watch)
    assert "the keeper on here was ended by SIGKILL; it is started again" in caplog.text
    assert torch.equal(counts(printed), torch.full((SAMPLES,), float(EPOCHS)))


@pytest.mark.soak
def test_with_the_host_of_the_keeper_the_run_ends(agents):
    with pytest.raises(WorkerFailed, match="the keeper cannot be started again: host 'there' is lost"):
        run("--pause", "0.2", strategy=None, on_progress=Loss(agents), servers_on="there")
