"""Plans of scripts: their steps are timed in a process of their own, and settings ordered by time."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from shoal.core.errors import ShoalError, WorkerFailed
from shoal.planning.objectives import Objective
from shoal.planning.plan_text import commands, winner
from shoal.planning.script_plan import plan_script
from shoal.planning.script_probe import probe_script
from shoal.sim import Network
from shoal.sim.hardware import Handling, Profile, Speeds, Wiring

WIRING = Wiring(Handling(5e-5, 1e-9), Handling(5e-5, 1e-9), 1e-4, 1e9)
PROFILE = Profile(
    platform.node(),
    1,
    transports={"grpc": WIRING},
    servers={"grpc": WIRING},
    codecs={"one_bit": Speeds(1e-9, 1e-9)},
)

SCRIPT = """
import time, torch, shoal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(1000, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(6400, 1000)), batch_size=32)
shoal.attach(model, optimizer)
for _ in range(100):
    for (x,) in shoal.shard(loader):
        time.sleep(0.05)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
open("ended", "w").close()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_programs")
def test_a_script_is_timed_ended_early_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    made = plan_script(["train.py"], 8, network=Network.parse("100Mbit,20ms"), profile=PROFILE)
    assert not (tmp_path / "ended").exists()
    assert made.workload.parameters == 10_010
    assert made.workload.samples == 6400
    assert made.workload.batch == 32
    assert made.workload.optimizer == pytest.approx(1)  # its momentum
    assert list(made.workload.refused) == ["strom"]  # it takes plain SGD alone
    assert {c.contender.word for c in made.forecasts}.isdisjoint({"strom", "hogwild"})
    assert 0.05 <= made.compute.mean < 1
    assert made.choice.contender.workers == 8
    assert "ordered by time alone" in made.notes[0]
    assert "equal within the noise" in winner(made)
    (line,) = commands(made, Path("plan.json"))
    assert line.startswith("shoal run --plan plan.json --strategy ")
    assert line.endswith(" train.py")


def run_probe(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    probe_script([str(tmp_path / "train.py")], ["one_bit"], 1)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_programs")
def test_a_script_that_never_attaches_is_told_so(tmp_path: Path):
    with pytest.raises(ShoalError, match=r"train\.py never called shoal\.attach"):
        run_probe(tmp_path, "print('hello')")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_programs")
def test_a_script_that_fails_shows_its_traceback(tmp_path: Path):
    with pytest.raises(WorkerFailed, match="failed before it had taken enough steps") as failure:
        run_probe(tmp_path, "import shoal\nraise RuntimeError('no data')")
    assert "no data" in failure.value.details


def test_a_script_cannot_aim_at_an_accuracy():
    with pytest.raises(ValueError, match="tells no accuracy before it has run"):
        plan_script(["train.py"], 4, profile=PROFILE, objective=Objective(target=0.9))
