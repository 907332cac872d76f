"""Lightning's Trainer with ShoalStrategy: the same training, on many workers."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from framework_runs import FOLDER, assert_close, needs, run_alone, run_by_torchrun, run_many, said, weights

from shoal.core.errors import WorkerFailed

SCRIPT = "lightning_trainer.py"
VARIANTS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
}

pytestmark = [needs("lightning", "lightning"), pytest.mark.slow, pytest.mark.usefixtures("warm_scripts")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_train_as_one_process_would(variant, tmp_path):
    """One worker to the bit; two with half the batch each up to rounding, with the same metrics."""
    trainer = VARIANTS[variant]
    plain = run_alone(SCRIPT, tmp_path / "plain", batch=32, trainer=trainer)
    alone = run_alone(SCRIPT, tmp_path / "alone", batch=32, trainer=trainer, strategy="sync")
    assert torch.equal(weights(plain), weights(alone))
    first, second = run_many(SCRIPT, tmp_path / "two", batch=16, trainer=trainer)
    assert torch.equal(weights(first), weights(second))
    rounding = 1e-2 if variant == "bf16" else 1e-5
    assert_close(weights(first), weights(plain), rounding)
    assert said(first, "epochs") == said(second, "epochs") == said(plain, "epochs")
    expected = json.loads(said(plain, "metrics"))
    for printed in (first, second):
        found = json.loads(said(printed, "metrics"))
        for name in ("loss", "val", "count"):
            assert found[name] == pytest.approx(expected[name], abs=10 * rounding), name
    assert_only_worker_0_wrote(tmp_path / "two")
    assert said(first, "best") == said(second, "best")


def assert_only_worker_0_wrote(folder: Path) -> None:
    (logs,) = (folder / "lightning_logs").iterdir()
    assert len(list(logs.rglob("metrics.csv"))) == 1
    assert len(list(logs.rglob("epoch=*.ckpt"))) == 2
    assert not list(folder.rglob("*-v1.ckpt"))  # what a second writer's would be called


def seen(printed: str, epoch: int) -> list[int]:
    lines = (line.split()[1:] for line in printed.splitlines() if line.startswith("seen "))
    return [int(index) for at, *indices in lines if int(at) == epoch for index in indices]


def test_each_sample_is_seen_once_in_a_pass_in_a_new_order(tmp_path):
    printed = run_many(SCRIPT, tmp_path, batch=8, shuffle=True)
    first = [index for one in printed for index in seen(one, 0)]
    second = [index for one in printed for index in seen(one, 1)]
    assert sorted(first) == sorted(second) == list(range(90))
    assert first != second


@pytest.mark.parametrize("launch", ["diloco", "asgd", "gossip"])
def test_other_strategies_end_with_one_model_that_has_learnt(launch, tmp_path):
    options = {"optimizer": "adamw", "period": 4} if launch == "diloco" else {"momentum": 0.0}
    first, second = run_many(SCRIPT, tmp_path, launch=launch, batch=8, epochs=4, **options)
    assert torch.equal(weights(first), weights(second))
    assert json.loads(said(first, "metrics"))["val"] < 1.0
    assert said(first, "epochs") == said(second, "epochs")


def test_a_checkpoint_holds_the_common_model(tmp_path):
    """Between two merges each worker has a model of its own; what is saved is that of the last merge."""
    options = {"strategy": "local", "options": {"period": 1000}, "batch": 16}
    first, second = run_many(SCRIPT, tmp_path, launch=None, **options)
    assert torch.equal(weights(first), weights(second))
    (saved,) = tmp_path.rglob("epoch=1.ckpt")
    kept = torch.load(saved, weights_only=False)["state_dict"]
    start = runpy.run_path(str(FOLDER / "samples.py"))["network"]().state_dict()
    assert all(torch.equal(kept[f"net.{name}"], p) for name, p in start.items())  # nothing was merged before


def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path):
    whole = run_many(SCRIPT, tmp_path / "whole", batch=16, shuffle=True, epochs=4)
    (saved,) = (tmp_path / "whole").rglob("epoch=1.ckpt")
    resumed = run_many(SCRIPT, tmp_path / "rest", batch=16, shuffle=True, epochs=4, resume=str(saved))
    assert torch.equal(weights(whole[0]), weights(resumed[0]))
    assert torch.equal(weights(resumed[0]), weights(resumed[1]))
    assert not seen(resumed[0], 1) and seen(resumed[0], 2) == seen(whole[0], 2)


def test_all_stop_when_one_of_them_wants_to(tmp_path):
    printed = run_many(SCRIPT, tmp_path, batch=16, epochs=9, stops=True)
    assert [said(one, "epochs").split()[0] for one in printed] == ["2", "2"]


def test_a_server_that_runs_adam_cannot_be_resumed(tmp_path):
    run_many(SCRIPT, tmp_path, launch="asgd", batch=16, optimizer="adamw")
    (saved,) = tmp_path.rglob("epoch=1.ckpt")
    with pytest.raises(WorkerFailed, match="runs AdamW at its server"):
        run_many(SCRIPT, tmp_path / "rest", launch="asgd", batch=16, optimizer="adamw", resume=str(saved))


def test_torchrun_starts_workers_too(tmp_path):
    """Each prints its weights: both the same, and those of one process with the whole batch."""
    plain = run_alone(SCRIPT, tmp_path / "plain", batch=30)
    done = run_by_torchrun(SCRIPT, tmp_path / "two", batch=15, strategy="sync")
    assert done.returncode == 0, done.errors
    first, second = done.printed
    assert torch.equal(weights(first), weights(second))
    assert_close(weights(first), weights(plain))
    assert len([*(tmp_path / "two").rglob("metrics.csv")]) == 1  # worker 0 alone logs


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"devices": 2}, "devices=2 asks Lightning to start processes"),
        ({"num_nodes": 2}, "num_nodes=2 asks Lightning to count hosts"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True needs torch.distributed"),
    ],
)
def test_a_trainer_that_asks_for_something_else_is_refused(options, why, two_workers):
    import lightning

    from shoal.integrations.lightning import ShoalStrategy

    with pytest.raises(ValueError, match=why):
        lightning.Trainer(accelerator="cpu", strategy=ShoalStrategy("sync"), **options)


@pytest.mark.filterwarnings("ignore")
def test_words_and_launches_that_do_not_fit_are_refused(two_workers):
    from shoal.integrations.lightning import ShoalStrategy

    with pytest.raises(ValueError, match="Did you mean 'diloco'"):
        ShoalStrategy("dilco")
    with pytest.raises(TypeError, match="pass period only with the name"):
        ShoalStrategy(period=3)
    with pytest.raises(ValueError, match="needs a server, so it must be named on the command line"):
        ShoalStrategy("asgd")
    two_workers(checkpoint="folder")
    with pytest.raises(ValueError, match="use the checkpoints of Lightning instead"):
        ShoalStrategy("sync")


@pytest.mark.filterwarnings("ignore")
def test_data_that_cannot_be_shared_equally_is_refused(two_workers):
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

    from shoal.integrations.lightning import TRAINING_LOADERS, ShoalStrategy

    class Endless(IterableDataset):
        def __iter__(self):
            yield from range(9)

    strategy = ShoalStrategy("sync")
    strategy._shares_data, strategy._deals = True, True
    data = list(range(21))
    odd = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False))
    with pytest.raises(ValueError, match="Endless or its loader says only while it is read"):
        strategy.process_dataloader(DataLoader(Endless()))
    with pytest.raises(ValueError, match="7 batches of its own batch sampler, which 2 workers"):
        strategy.process_dataloader(odd)
    with pytest.raises(ValueError, match="a list cannot be shared among 2 workers"):
        strategy.process_dataloader(data)
    assert len(strategy.process_dataloader(DataLoader(data, 4))) == 3
    assert TRAINING_LOADERS  # the control: only after that barrier
    strategy._deals = False
    assert strategy.process_dataloader(odd) is odd
