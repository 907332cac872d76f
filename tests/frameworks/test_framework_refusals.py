"""What Shoal refuses inside another library: whoever averages or divides the model beside it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from framework_runs import assert_close, needs, run_alone, run_many, weights
from torch import nn

import shoal
from shoal.core.errors import WorkerFailed
from shoal.integrations.workers import Workers
from shoal.strategies.local import Local

LIGHTNING = "lightning_trainer.py"
AVERAGING = {  # under `sync` they work: the weights are the same at all workers when they are averaged
    "StochasticWeightAveraging": {"swa_lrs": 0.05, "swa_epoch_start": 1},
    "EMAWeightAveraging": {"decay": 0.5},
}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@needs("lightning", "lightning")
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize("callback", AVERAGING)
def test_lightning_averages_weights_beside_sync_and_beside_no_other_strategy(callback, tmp_path):
    wanted = {"averages": [callback, AVERAGING[callback]], "epochs": 3}
    with pytest.raises(WorkerFailed, match=f"{callback} replaces the weights in the end, which BMUF"):
        run_many(LIGHTNING, tmp_path / "bmuf", launch="bmuf", batch=16, **wanted)
    first, second = run_many(LIGHTNING, tmp_path / "sync", batch=16, **wanted)
    assert torch.equal(weights(first), weights(second))
    assert_close(weights(first), weights(run_alone(LIGHTNING, tmp_path / "plain", batch=32, **wanted)))
    without = run_alone(LIGHTNING, tmp_path / "control", batch=32, epochs=3)
    assert not torch.allclose(weights(first), weights(without), atol=1e-4)  # the control: it does average


def test_the_options_of_a_strategy_come_in_its_word_or_beside_it(two_workers):
    found = Workers("Lightning", "local:period=8", None, {"warmup": 2})
    assert found.strategy == Local(period=8, warmup=2)
    with pytest.raises(ValueError, match="'local:period=8' has 'period' already"):
        Workers("Lightning", "local:period=8", None, {"period": 4})


@needs("lightning", "lightning")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lightning_worker_takes_one_of_several_gpus(rank, two_workers):
    from shoal.integrations.lightning import ShoalFabricStrategy, ShoalStrategy

    two_workers(rank)
    for kind in (ShoalStrategy, ShoalFabricStrategy):
        strategy = kind("sync")
        strategy.parallel_devices = [torch.device("cuda", number) for number in range(2)]
        assert strategy.root_device == torch.device("cuda", rank)
        assert strategy.world_size == 2


@needs("transformers", "huggingface")
@pytest.mark.parametrize(
    ("given", "changed", "why"),
    [
        ({}, {"_n_gpu": 2}, "would spread each worker over 2 GPUs; let each worker see one"),
        ({"fsdp": True}, {}, "DeepSpeed and FSDP divide the model"),
        ({}, {"deepspeed": {"train_batch_size": "auto"}}, "DeepSpeed and FSDP divide the model"),
    ],
    ids=["gpus", "fsdp", "deepspeed"],
)
def test_transformers_may_not_spread_a_worker(given, changed, why, tmp_path, two_workers, monkeypatch):
    """What is changed afterwards, TrainingArguments would take only where there are GPUs, or DeepSpeed."""
    from transformers import TrainingArguments

    from shoal.integrations.huggingface import ShoalTrainer

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # what fsdp=True sets, and never resets

    def arguments(**options):
        return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)

    ShoalTrainer(nn.Linear(2, 2), arguments(), strategy="sync")  # the control
    args = arguments(**given)
    for name, value in changed.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=why):
        ShoalTrainer(nn.Linear(2, 2), args, strategy="sync")


@pytest.fixture
def lone_group():
    """A process group of torch's that this process is alone in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@needs("accelerate", "accelerate")
def test_a_model_that_fsdp_has_wrapped_is_refused(two_workers, lone_group):
    from accelerate import Accelerator
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerator = Accelerator(cpu=True)
    model = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel, .* with fully_shard instead"):
        shoal.attach(*accelerator.prepare(model, optimizer))


@needs("accelerate", "accelerate")
def test_a_model_that_deepspeed_has_wrapped_is_refused(two_workers):
    """Known by the name of its class: the library itself needs a GPU and a compiler."""
    from accelerate import Accelerator

    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    accelerator = Accelerator(cpu=True)
    model = DeepSpeedEngine(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="wrapped in DeepSpeedEngine, which synchronises it already"):
        shoal.attach(*accelerator.prepare(model, optimizer))
