"""Accelerate: attach() before or after prepare(), and never DDP on top."""

from __future__ import annotations

import pytest
import torch
from framework_runs import assert_close, needs, run_alone, run_by_torchrun, run_many, said, weights
from torch import nn

import shoal

SCRIPT = "accelerate_loop.py"
VARIANTS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
}

pytestmark = [needs("accelerate", "accelerate"), pytest.mark.slow, pytest.mark.usefixtures("warm_scripts")]


@pytest.mark.parametrize(
    ("variant", "order"),
    [("plain", "after"), ("accumulated", "before"), ("accumulated", "after"), ("bf16", "after")],
)
def test_workers_train_as_one_process_would(variant, order, tmp_path):
    """One worker to the bit; two with half the batch each up to rounding, and a last short accumulation."""
    options = {"accelerator": VARIANTS[variant]}
    plain = run_alone(SCRIPT, tmp_path, batch=32, **options)
    alone = run_alone(SCRIPT, tmp_path, batch=32, strategy="sync", order=order, **options)
    assert torch.equal(weights(plain), weights(alone))
    first, second = run_many(SCRIPT, tmp_path, batch=16, order=order, **options)
    assert torch.equal(weights(first), weights(second))
    assert_close(weights(first), weights(plain), 1e-2 if variant == "bf16" else 1e-5)
    assert said(first, "steps") == said(second, "steps") == said(plain, "steps")
    assert "printed by the main process" in first
    assert "printed by the main process" not in second


def test_each_sample_is_seen_once_in_a_pass_in_a_new_order(tmp_path):
    printed = run_many(SCRIPT, tmp_path, batch=8, shuffle=True)
    lines = [line.split()[1:] for one in printed for line in one.splitlines() if line.startswith("seen ")]
    first, second = ([int(i) for at, *indices in lines if at == e for i in indices] for e in "01")
    assert sorted(first) == sorted(second) == list(range(90))
    assert first != second


def test_state_is_saved_once_and_resumed_at_all_workers(tmp_path):
    whole = run_many(SCRIPT, tmp_path, batch=16, epochs=3, saves=True)
    assert sorted(path.name for path in (tmp_path / "1").iterdir() if path.name != "random_states_1.pkl") == [
        *("model.safetensors", "optimizer.bin", "random_states_0.pkl", "scheduler.bin")
    ]
    resumed = run_many(SCRIPT, tmp_path / "rest", batch=16, begin=2, epochs=3, resume=str(tmp_path / "1"))
    assert torch.equal(weights(whole[0]), weights(resumed[0]))
    assert torch.equal(weights(resumed[0]), weights(resumed[1]))


def test_an_accelerator_that_is_distributed_itself_is_refused(tmp_path):
    """It would put DDP on top, and average twice."""
    done = run_by_torchrun(SCRIPT, tmp_path, batch=16, strategy="sync")
    assert done.returncode != 0
    assert "the model is wrapped in DistributedDataParallel, which synchronises it already" in done.errors
    done = run_by_torchrun(SCRIPT, tmp_path, batch=16, strategy="sync", order="before")
    assert done.returncode != 0
    assert "Accelerate runs 2 processes itself" in done.errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_grad_scaler_inside_the_wrapper_steps_through_shoal(order):
    """With a scaler, Accelerate keeps the step that it found. Overflows are skipped, as without Shoal."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = shoal.attach(model, optimizer) if attached and order == "before" else None
        wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
        training = shoal.attach(model, wrapped) if attached and order == "after" else training
        for step in range(6):
            if step == 4 and training is not None:
                assert training.engine.progress.t == 4  # every step went through it
                training.finish()
                wrapped = AcceleratedOptimizer(optimizer, scaler=scaler) if order == "before" else wrapped
            wrapped.zero_grad()
            x = torch.full((3, 4), float("inf") if step == 2 else 1.0 + step)
            scaler.scale(model(x).square().mean()).backward()
            wrapped.step()
        found.append((model.weight.detach().clone(), scaler.get_scale()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] < 1024
