"""The acts of the demo at a tiny size: real processes train, and are really killed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.errors import WorkerFailed
from shoal.demo import program, this_machine
from shoal.demo.drawings import draw_data, drawings
from shoal.demo.eight_machines import simulate_eight
from shoal.demo.killed import train_and_kill
from shoal.demo.machine_load import MachineLoad, measure_load
from shoal.demo.plain_ddp import run_ddp
from shoal.demo.program import Size, run_demo
from shoal.report import ProgressDisplay
from shoal.studies.study import Lab

TINY = Size(widths=(16, 16, 16), samples=(640, 640, 3200), epochs=(1, 2, 4), tests=100, seconds=0.0)


def silent() -> ProgressDisplay:
    return ProgressDisplay(enabled=False)


@dataclass
class Wait:
    """Inputs as they are; but from its 55th batch of about 67 on, a process waits for `end` to be there."""

    end: Path
    batches: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        deadline = time.monotonic() + 200
        while self.batches >= 55 and not self.end.exists():
            assert time.monotonic() < deadline, "the killed ones did not come back"
            time.sleep(0.01)
        return x


class UntilAllAreBack(ProgressDisplay):
    """Lets a run end when worker 2 and the server were killed and are back, however long that takes."""

    def __init__(self, end: Path) -> None:
        super().__init__(enabled=False)
        self._end, self._back = end, set()

    def update(self, event: Mapping[str, Any]) -> None:
        if str(event.get("fault")).endswith("is back"):
            self._back.add(event["role"])
        if self._back == {"worker", "server"}:
            self._end.touch()


def broken_data():
    raise RuntimeError("the pencil broke")


def test_the_digits_are_the_same_in_every_process_and_can_be_told_apart():
    data, again = draw_data(200, 50, 0.3, 0.3), draw_data(200, 50, 0.3, 0.3)
    assert torch.equal(data.x, again.x) and data.x.shape == (200, 784) and len(data.test_y) == 50
    means = torch.stack([data.x[data.y == digit].mean(0) for digit in range(10)])
    assert torch.cdist(means, means).fill_diagonal_(9.0).min() > 0.5


def test_the_load_is_a_share_of_the_cores():
    load = measure_load(0.05)
    assert load.cores >= 1 and (load.others is None or 0 <= load.others <= 1)


@pytest.mark.slow
def test_one_worker_two_and_ddp_take_turns():
    lab = Lab(silent())
    figures = this_machine.train_here(lab, MachineLoad(2, 0.0), drawings(16, 0.3, 640, 100), 1, seconds=0.0)
    (trials,) = figures.rounds
    kinds = (this_machine.ONE, this_machine.TWO, this_machine.APART, this_machine.DDP)
    assert list(trials) == list(kinds) and all(trial.seconds > 0 for trial in trials.values())
    assert figures.samples == 640 and figures.speed_up(this_machine.ONE) == 1
    assert trials[this_machine.APART].accuracy is None and trials[this_machine.DDP].accuracy >= 0
    assert [record["name"].partition(": ")[2] for record in lab.records] == list(kinds)


@pytest.mark.slow
def test_ddp_that_fails_says_why():
    task = drawings(16, 0.3)
    with pytest.raises(WorkerFailed, match="DistributedDataParallel failed: RuntimeError: the pencil broke"):
        run_ddp(task.__class__("broken", task.model, broken_data), 2, 1, 0)


@pytest.mark.soak
def test_eight_machines_pay_for_a_slow_link_in_virtual_time():
    task = drawings(16, 0.2, 5120, 100, fresh=True)
    slow, fast = (simulate_eight(Lab(silent()), task, 4, network) for network in ("1Mbit,20ms", "10Gbit,1us"))
    assert [record["strategy"] for record in slow.records] == ["single", "sync", "bmuf", "diloco"]
    assert slow.speed_up("sync") < 1 < fast.speed_up("sync")
    assert slow.speed_up("bmuf") > 4 * slow.speed_up("sync")
    assert slow.accuracy("sync") == fast.accuracy("sync")  # the network changes no bit of the result
    assert all(abs(acts.prediction_error(word)) < 0.2 for acts in (slow, fast) for word in acts.predicted)


@pytest.mark.slow
def test_a_worker_and_the_server_are_killed_and_the_loss_goes_on(tmp_path, caplog):
    end = tmp_path / "the run may end"
    task = replace(drawings(16, 0.1, 3200, 100), augment=Wait(end))
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        figures = train_and_kill(UntilAllAreBack(end), task, 4)
    assert [kill.name for kill in figures.kills] == ["worker 2", "the server"]
    assert not any(Path(f"/proc/{kill.pid}").exists() for kill in figures.kills)
    assert (figures.workers, figures.left) == (3, 3)  # the worker comes back
    assert any(fault.endswith("nothing was lost") for fault in figures.faults)
    after = [loss for seconds, loss in figures.losses if seconds > figures.kills[1].seconds]
    assert after and figures.last_loss < figures.losses[0][1]
    assert figures.curve()[0][0] < figures.curve()[-1][0]


@pytest.mark.slow
@pytest.mark.soak  # each act has a test of its own
def test_the_whole_demo_ends_with_its_five_lines_and_the_next_command(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(program, "measure_load", lambda: MachineLoad(2, 0.0))
    page, figures = tmp_path / "demo.html", tmp_path / "demo.json"
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        run_demo("250Mbit,1ms", page, figures, quiet=True, size=TINY)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    last = shown[shown.index("What this run has shown") :]
    assert [f"\n{number}. " in last for number in (1, 2, 3, 4, 5, 6)] == [True] * 5 + [False]
    assert "shoal run -n 2 --strategy" in last and last.rstrip().endswith(f"report: {page}")
    assert "</html>" in page.read_text()
    assert json.loads(figures.read_text()).keys() == {"here", "eight", "killed"}
