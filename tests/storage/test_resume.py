"""Stopping and going on is the same as never having stopped."""

import os
import shutil
import signal
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import marks
import sabotage
import shoal
from sampling import mostly_soak
from shoal.core.codec import Identity
from shoal.report.goal import Goal
from shoal.runs.plan import Plan
from shoal.sim import Compute, Faults
from shoal.storage.step_folders import steps_in
from shoal.strategies import (
    ASGD,
    DCASGD,
    SSP,
    AsyncDiLoCo,
    DecoupledDiLoCo,
    DecoupledMomentum,
    HALoS,
    Hierarchical,
    Hogwild,
    MuLoCo,
    PostLocal,
    SlowMo,
    SoftSync,
    SparseLoCo,
    StreamingDiLoCo,
    SyncServer,
)
from shoal.testing import blobs

COMPRESSED = [
    DecoupledMomentum(kept=4),
    SparseLoCo(period=4, density=0.25),
    SparseLoCo(period=1, values="exact", merge="all"),
]
OVERLAPPED = [  # a run stops while an average is under way
    *(kind(period=4, overlap=1) for kind in (shoal.Local, shoal.BMUF, SlowMo, shoal.DiLoCo)),
    StreamingDiLoCo(period=6, fragments=2, overlap=2),
    StreamingDiLoCo(period=4, fragments=2, eager=True),
]
WITH_FEEDBACK = ["top_k:density=0.1", "one_bit:feedback=double"]
SYNCHRONOUS = [
    shoal.Sync(),
    shoal.Local(period=4),
    shoal.Local(period=4, penalty=1.0),
    PostLocal(switch=3, period=4),
    PostLocal(switch=10, period=4),  # stops before the switch
    shoal.BMUF(period=4, warmup=2),
    SlowMo(period=4),
    shoal.DiLoCo(period=4),
    *OVERLAPPED,
    MuLoCo(period=4),
    shoal.EASGD(period=4, synchronous=True),
]


WITH_A_SERVER = [
    SyncServer(),
    SyncServer(backup=1),
    Hierarchical(),
    SoftSync(wait=True),
    SSP(bound=0),
    ASGD(),
    DCASGD(),
    shoal.Downpour(n_push=2, n_fetch=2),
    shoal.EASGD(period=4),
    AsyncDiLoCo(period=4),
    DecoupledDiLoCo(period=4, fragments=2, overlap=1),
    DecoupledDiLoCo(period=12, fragments=2, overlap=5, quorum=3),  # stops while one is under way
    HALoS(period=4, exchange=3),
    Hogwild(),
]


@dataclass(frozen=True)
class Rounds(Identity):
    """Keeps so many digits."""

    digits: int = 2


def weights(result: shoal.Result) -> torch.Tensor:
    assert result.model is not None
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *mostly_soak([*product(SYNCHRONOUS, ["none", "fp16"]), *product(COMPRESSED, ["none"])], few=6),
        *mostly_soak([*product(OVERLAPPED, WITH_FEEDBACK)], few=4),
    ],
)
def test_resuming_in_virtual_time_is_bit_equal(strategy, codec, tmp_path):
    settings = {"workers": 3, "transport": "sim", "codec": codec}
    shoal.run(blobs(), strategy, epochs=1, checkpoint=tmp_path, **settings)  # 7 steps: stops in mid-block
    resumed = shoal.run(blobs(), strategy, epochs=3, checkpoint=tmp_path, every=3, **settings)
    straight = shoal.run(blobs(), strategy, epochs=3, **settings)
    assert torch.equal(weights(resumed), weights(straight))
    assert resumed.samples == straight.samples


@pytest.mark.parametrize("strategy", mostly_soak(WITH_A_SERVER, few=5), ids=repr)
def test_resuming_with_a_server_in_virtual_time_is_bit_equal(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim", "epochs": 3, "compute": Compute(mean=1.0, jitter=0.0)}
    straight = shoal.run(blobs(), strategy, **settings, checkpoint=tmp_path, every=9)
    shutil.rmtree(tmp_path / max(path.name for path in tmp_path.iterdir() if path.is_dir()))  # its end
    resumed = shoal.run(blobs(), strategy, **settings, checkpoint=tmp_path)
    assert torch.equal(weights(resumed), weights(straight))
    assert resumed.samples == straight.samples


@pytest.mark.parametrize(("n_push", "n_fetch", "every"), [(1, 1, 5), (4, 1, 7), (2, 3, 3)])
def test_pushes_beside_pulls_that_were_under_way_are_applied_once(
    n_push, n_fetch, every, tmp_path, monkeypatch
):
    monkeypatch.setattr(marks, "SECONDS", 0.0)
    server = {"optimizer": "sgd", "rate": 4.0, "warmup": 0}
    strategy = shoal.Downpour(n_push=n_push, n_fetch=n_fetch, overlap=True, **server)
    settings = {"workers": 4, "transport": "sim", "compute": Compute(mean=1.0, jitter=0.3), "tests": 0}
    shoal.run(marks.marks(), strategy, checkpoint=tmp_path, every=every, **settings)
    shutil.rmtree(max(path for path in tmp_path.iterdir() if path.is_dir()))  # the end
    resumed = shoal.run(marks.marks(), strategy, checkpoint=tmp_path, **settings)
    assert resumed.model.marks.unique().tolist() == [-1.0]


@pytest.mark.slow
def test_resuming_on_processes_is_bit_equal(tmp_path):
    strategy = shoal.BMUF(period=4)
    shoal.run(blobs(), strategy, workers=2, epochs=1, checkpoint=tmp_path, every=3)
    resumed = shoal.run(blobs(), strategy, workers=2, epochs=3, checkpoint=tmp_path)
    assert torch.equal(
        weights(resumed), weights(shoal.run(blobs(), strategy, workers=2, epochs=3, transport="sim"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak(["downpour", "easgd"], few=1))
def test_a_server_is_saved_and_resumed_with_its_workers(name, tmp_path):
    shoal.run(blobs(), name, workers=2, epochs=1, checkpoint=tmp_path, every=5)
    saved = sorted(path.name for path in (tmp_path / "step-00000010").iterdir())
    expected = [
        "model.safetensors",
        *(f"{n}.{end}" for n in ("server-0", "worker-0", "worker-1") for end in ("json", "safetensors")),
    ]
    assert saved == sorted(expected)
    resumed = shoal.run(blobs(), name, workers=2, epochs=4, checkpoint=tmp_path)
    assert resumed.samples == 4 * 300
    assert resumed.test_accuracy > 75


@pytest.mark.slow
def test_ctrl_c_saves_at_one_step_for_all_and_the_same_call_goes_on(tmp_path):
    pressed = []

    def press_ctrl_c(event):
        if event["step"] > 5 and not pressed:
            pressed.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    settings = {"workers": 3, "checkpoint": tmp_path}
    with pytest.raises(shoal.Interrupted):
        shoal.run(blobs(), sabotage.Slow(), epochs=20, on_progress=press_ctrl_c, **settings)
    (step,) = tmp_path.glob("step-*")
    assert not (tmp_path / "model.safetensors").exists()  # training is not over
    assert 5 < int(step.name[5:]) < 140
    resumed = shoal.run(blobs(), sabotage.Slow(), epochs=20, **settings)
    straight = shoal.run(blobs(), "sync", workers=3, epochs=20, transport="sim")
    assert torch.equal(weights(resumed), weights(straight))


def test_the_saved_model_has_its_own_names(tmp_path):
    result = shoal.run(blobs(), "bmuf", workers=2, transport="sim", checkpoint=tmp_path, every=10)
    saved = load_file(tmp_path / "step-00000010" / "model.safetensors")
    assert result.model is not None
    assert saved.keys() == result.model.state_dict().keys()
    result.model.load_state_dict(saved)


def test_another_run_s_checkpoint_is_refused_with_the_difference(tmp_path):
    shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path, every=5)
    with pytest.raises(shoal.CheckpointError, match=r"lr=0.1 \(now 0.2\)"):
        shoal.run(blobs(), "sync", workers=2, lr=0.2, transport="sim", checkpoint=tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    """The task has the same name and settings; in processes the data is made anew in each."""
    first, second = (replace(blobs(), data=partial(some_of_it, count)) for count in (200, 199))
    shoal.run(first, "sync", workers=2, epochs=1, checkpoint=tmp_path, transport="sim")
    for transport in ("sim", "processes"):
        with pytest.raises(
            shoal.ShoalError, match=r"belongs to another run: data='200 samples, \w+' \(now '199 "
        ):
            shoal.run(second, "sync", workers=2, epochs=2, checkpoint=tmp_path, transport=transport)


def some_of_it(count):
    data = blobs().data()
    return replace(data, x=data.x[:count], y=data.y[:count])


def test_a_codec_with_other_options_makes_another_run():
    plans = [Plan(blobs(), shoal.Sync(), Rounds(digits)) for digits in (2, 3)]
    assert plans[0].same_run() != plans[1].same_run()
    data = plans[0].task.data()
    assert plans[0].config(data)["codec"] == plans[1].config(data)["codec"] == "Rounds"


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "missing"])
@pytest.mark.parametrize("name", ["worker-1.safetensors", "worker-0.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(name, how, tmp_path):
    settings = {"workers": 2, "transport": "sim"}
    shoal.run(
        blobs(), "sync", epochs=1, checkpoint=tmp_path, every=4, **settings
    )  # saved at 4, 8 and the end, 10
    damage(tmp_path / "step-00000010" / name, how)
    resumed = shoal.run(blobs(), "sync", epochs=2, checkpoint=tmp_path, **settings)
    assert torch.equal(weights(resumed), weights(shoal.run(blobs(), "sync", epochs=2, **settings)))


@pytest.mark.slow
def test_damage_that_one_process_finds_sends_all_back_to_the_step_before(tmp_path):
    shoal.run(blobs(), "sync", workers=2, epochs=1, checkpoint=tmp_path, every=4)
    damage(tmp_path / "step-00000010" / "worker-1.safetensors", "flipped")
    resumed = shoal.run(blobs(), "sync", workers=2, epochs=2, checkpoint=tmp_path)
    straight = shoal.run(blobs(), "sync", workers=2, epochs=2, transport="sim")
    assert torch.equal(weights(resumed), weights(straight))


def test_to_resume_every_file_of_tensors_is_checked_and_loaded_once(tmp_path, monkeypatch):
    settings = {"workers": 4, "transport": "sim", "checkpoint": tmp_path}
    shoal.run(blobs(), "sync", **settings)
    reads, read = Counter(), Path.read_bytes

    def counted(path):
        reads[path.name] += 1
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    shoal.run(blobs(), "sync", **settings)
    assert {reads[f"worker-{k}.safetensors"] for k in range(4)} == {2}
    assert reads["model.safetensors"] == 1


def test_a_node_reads_its_own_files_and_what_worker_0_says_of_the_run(tmp_path, monkeypatch):
    shoal.run(blobs(), "sync", workers=4, transport="sim", checkpoint=tmp_path)
    plan = Plan(blobs(), shoal.Sync(), Identity(), workers=4, checkpoint=str(tmp_path))
    reads, read = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path.name) or read(path))
    saved = plan.checkpoints(blobs().data())
    saved.check()
    assert saved.newest(plan.identity(3)) == 5
    assert reads == ["worker-0.json", "worker-3.json", "worker-3.safetensors"]


@pytest.mark.parametrize("strategy", ["sync", "asgd", "gossip"])
def test_the_two_newest_checkpoints_are_kept(tmp_path, strategy):
    shoal.run(blobs(), strategy, workers=2, transport="sim", epochs=3, checkpoint=tmp_path, every=4)
    assert sorted(steps_in(tmp_path)) == [28, 30]


def test_checkpoints_are_nobody_else_s_to_read(tmp_path):
    shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path / "new", every=5)
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "new").rglob("*") if p.is_file()} == {"0o600"}


@pytest.mark.parametrize("strategy", mostly_soak(SYNCHRONOUS, few=2), ids=lambda s: type(s).__name__)
def test_running_a_finished_run_again_gives_the_same_model(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim", "epochs": 1, "checkpoint": tmp_path}
    first = shoal.run(blobs(), strategy, **settings)  # 7 steps: the last block is cut short
    again = shoal.run(blobs(), strategy, **settings)
    assert torch.equal(weights(first), weights(again))
    assert first.test_loss == again.test_loss


@pytest.mark.parametrize("name", ["local", "downpour"])
def test_tied_weights_are_saved_alike_under_both_names(name, tmp_path):
    task = sabotage.with_tied_weights()
    shoal.run(task, name, workers=2, transport="sim", checkpoint=tmp_path, every=5)
    for path in tmp_path.rglob("model.safetensors"):
        saved = load_file(path)
        assert torch.equal(saved["0.weight"], saved["1.weight"])


def test_a_step_that_only_a_worker_which_died_since_had_reached_is_not_saved(tmp_path):
    # Worker 1 saves before step 5 and dies at step 8; worker 0 comes to step 5 only then.
    slow = Compute(mean=1.0, slow={0: 4.0})
    settings = {"workers": 3, "transport": "sim", "checkpoint": tmp_path, "every": 5}
    shoal.run(blobs(), "asgd", epochs=2, compute=slow, faults=Faults().crash(rank=1, step=8), **settings)
    resumed = shoal.run(blobs(), "asgd", epochs=2, compute=slow, **settings)
    assert resumed.samples == 2 * 300


def test_a_resumed_run_is_not_timed_to_a_goal(tmp_path):
    settings = {"workers": 2, "transport": "sim", "compute": Compute(0.01)}
    whole = shoal.run(blobs(), "sync", epochs=4, **settings).record()
    shoal.run(blobs(), "sync", epochs=2, checkpoint=tmp_path, **settings)
    runs = [shoal.run(blobs(), "sync", epochs=4, checkpoint=tmp_path, **settings).record() for _ in range(2)]
    goal = Goal("test_accuracy", whole["curve"][-1]["test_accuracy"], given=True)
    assert goal.seconds(whole) is not None
    for run in runs:  # half of it was left, then nothing
        assert run["curve"][-1]["test_accuracy"] >= goal.value
        assert run["seconds"] < whole["seconds"]
        assert goal.seconds(run) is None
