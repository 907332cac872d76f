"""attach(): the user's loop stays as it is, and everything that hangs on it keeps working."""

import contextlib
import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from forked import ForkedPython
from ports import free_port
from same_way import check_way, rate
from sampling import mostly_soak
from scripts import final_weights
from scripts import run_loop as run_a_script
from shoal.strategies import STRATEGIES

LOOP = Path(__file__).with_name("loop.py")
FREEZES = """
import torch, shoal
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with shoal.attach(model, optimizer):
    for step in range(6):
        model.bias.requires_grad_(step < 3)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
print("done")
"""
CHANGES = """
import torch, shoal
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with shoal.attach(model, optimizer) as training:
    for step in range(24):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        if step == 12:
            with training.common_model():
                pass
            torch.nn.init.ones_(model.weight)
print("all ones", torch.allclose(model.weight, torch.ones(2, 4), rtol=0, atol=1e-6))  # local adds differences
"""
GIVES_UP = """
import pathlib, time, torch, shoal
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training, began = shoal.attach(model, optimizer), time.monotonic()
here = pathlib.Path(__file__).with_name(str(training.rank))
try:
    with training:
        for step in range(50):
            if (training.rank, step) == (1, 5):
                raise KeyError
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
except Exception as error:
    here.write_text(type(error).__name__)
while not all(here.with_name(name).exists() for name in "01") and time.monotonic() < began + 40:
    time.sleep(0.05)  # it goes on with something else
"""


steps_never = pytest.mark.filterwarnings("ignore:optimizer.step")


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.randn(30, 16, 8), torch.randint(3, (30, 16))


def train(model, optimizer, xs, ys, after_step=lambda: None):
    for x, y in zip(xs, ys, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after_step()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["sgd", "adamw"])
def test_a_single_worker_trains_as_if_nothing_were_attached(make):
    model, xs, ys = model_and_data()
    plain = copy.deepcopy(model)
    train(plain, make(plain.parameters(), lr=0.05), xs, ys)
    optimizer = make(model.parameters(), lr=0.05)
    with shoal.attach(model, optimizer):
        train(model, optimizer, xs, ys)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_keeps_working_made_before_or_after(scheduler_first):
    model, xs, ys = model_and_data()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, optimizer, xs, ys, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5).step)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if scheduler_first else None
    with shoal.attach(model, optimizer):
        schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        train(model, optimizer, xs, ys, schedule.step)  # a warning about the order of steps would be an error
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def train_scaled(model, optimizer, xs, ys):
    """With an input that overflows in its step 3, which GradScaler must skip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, (x, y) in enumerate(zip(xs, ys, strict=True)):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x * (float("inf") if step == 3 else 1)), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_grad_scaler_keeps_working_and_skips_what_overflowed():
    model, xs, ys = model_and_data()
    plain = copy.deepcopy(model)
    expected = train_scaled(plain, torch.optim.SGD(plain.parameters(), lr=0.1), xs, ys)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.attach(model, optimizer):
        assert train_scaled(model, optimizer, xs, ys) == expected
    assert expected[3] < expected[2]  # the control: the step did overflow
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_closure_is_called_once_and_its_loss_returned():
    model, xs, ys = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xs[0]), ys[0])
        loss.backward()
        calls.append(loss)
        return loss

    with shoal.attach(model, optimizer):
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1


def test_the_optimizer_is_the_user_s_own_again_after_finish():
    model, _, _ = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = optimizer.step
    training = shoal.attach(model, optimizer)
    assert optimizer.step != before
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) was never called .* so nothing was trained"):
        training.finish()
    training.finish()
    assert optimizer.step == before
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@steps_never
def test_attaching_twice_is_refused():
    model, _, _ = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.attach(model, optimizer), pytest.raises(ValueError, match=r"attach\(\) was called before"):
        shoal.attach(model, optimizer)


def test_an_optimizer_of_another_model_is_refused():
    model, _, _ = model_and_data()
    with pytest.raises(ValueError, match="holds none of the model's trainable parameters"):
        shoal.attach(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_a_model_moved_after_attach_is_noticed():
    model, xs, ys = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    model.double()
    with pytest.raises(ValueError, match="were moved after Shoal took hold"):
        train(model, optimizer, xs.double(), ys)
    training.abandon()


def test_a_gradient_that_is_not_finite_is_noticed():
    model, xs, ys = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    with pytest.raises(shoal.Diverged, match="Try a smaller learning rate"):
        train(model, optimizer, xs * float("nan"), ys)
    training.abandon()


# -- several processes -----------------------------------------------------------------------------


OWN_LOOP = Path(__file__).with_name("own_loop.py")
warm = pytest.mark.usefixtures("warm_scripts")
run_loop = partial(run_a_script, script=LOOP)


def apart(printed: str, other: str) -> float:
    """The distance between two final models, as a part of the way from the start to the first."""
    first, second = final_weights(printed), final_weights(other)
    return float((first - second).norm() / (first - final_weights(printed, "start")).norm())


HALF_THE_WAY = 0.5  # of a model that learnt nothing it is 1; two runs of one command are up to 0.33 apart


def torchrun(*arguments: str, processes: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    finished = subprocess.run(
        [*command, f"--nproc-per-node={processes}", str(LOOP), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def told_by_torchrun(*arguments: str, processes: int = 2) -> str:
    """What rank 0 prints, in processes that hear what torchrun would tell them."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = [sys.executable, str(LOOP), *arguments]
    ranks = [
        ForkedPython(line, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    (out, errors), *_ = [rank.communicate() for rank in ranks]
    assert [rank.wait() for rank in ranks] == [0] * processes, errors
    return out


@pytest.mark.soak
def test_torchrun_itself_starts_what_joins():
    assert torch.equal(final_weights(torchrun()), final_weights(told_by_torchrun()))


@pytest.mark.slow
@warm
def test_sync_equals_torch_ddp_after_50_steps_and_torchrun_is_joined():
    """Tolerance: float32 sums in another order, 50 steps; weights are of size 0.1 to 1."""
    arguments = ("--steps", "50", "--momentum", "0.9")
    theirs = final_weights(told_by_torchrun("--ddp", *arguments))
    joined = final_weights(told_by_torchrun(*arguments))
    torch.testing.assert_close(joined, theirs, rtol=0, atol=1e-5)
    first, second = (final_weights(printed) for printed in run_loop(*arguments))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@warm
def test_finish_gives_every_worker_the_trained_model():
    first, second = run_loop(strategy="bmuf", strategy_options={"period": "8"})
    assert torch.equal(final_weights(first), final_weights(second))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["easgd", "downpour"])
def test_finish_gives_every_worker_about_what_the_server_holds(strategy):
    """The one that ends first does not see the other's last updates. Not warm: 50 steps are too soon over."""
    first, second = run_loop(strategy=strategy)
    assert apart(first, second) < HALF_THE_WAY


ON_SEVERAL = [
    (word, transport)
    for word in STRATEGIES
    for transport in ("processes", "gloo")
    if word not in ("single", "ensemble", "sandblaster")
    and (word, transport) != ("hogwild", "gloo")  # shares memory
]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize(("strategy", "transport"), ON_SEVERAL)
def test_a_model_on_a_gpu_trains_as_on_the_cpu(strategy, transport):
    arguments = ("--rate", str(rate(strategy)))
    there, here = (
        run_loop("--device", device, *arguments, strategy=strategy, transport=transport)[0]
        for device in ("cuda", "cpu")
    )
    start = final_weights(here, "start")
    check_way(strategy, final_weights(there) - start, final_weights(here) - start)


@pytest.mark.slow
@warm
def test_a_script_that_raises_in_one_worker_is_reported_once_and_stops_all():
    with pytest.raises(shoal.WorkerFailed, match="worker 1 failed: RuntimeError: the cat") as caught:
        run_loop("--raise-at", "1", "10", workers=3)
    assert caught.value.details.count("Traceback") == 1
    assert "loop.py" in caught.value.details
    assert "runpy" not in caught.value.details


@pytest.mark.slow
@warm
def test_a_script_that_vanishes_is_reported_with_its_exit_code():
    with pytest.raises(shoal.WorkerFailed, match="worker 0 failed: it ended with exit code 7"):
        run_loop("--leave-at", "0", "10")


@pytest.mark.slow
@warm
def test_a_strategy_with_a_server_must_be_named_where_processes_are_started():
    with pytest.raises(shoal.WorkerFailed, match="needs a server, so it must be named on the command line"):
        run_loop("--strategy-in-code", "easgd", strategy=None)


@pytest.mark.slow
@warm
def test_frozen_layers_and_buffers_start_alike_too():
    first, second = (final_weights(printed) for printed in run_loop(script=OWN_LOOP))
    assert torch.equal(first, second)


@pytest.mark.soak
@warm
def test_what_a_script_does_after_finish_is_waited_for():
    printed = run_loop("--late", "work", script=OWN_LOOP)
    assert all("weights" in lines for lines in printed)


@pytest.mark.slow
@warm
def test_a_failure_after_finish_is_a_failure():
    with pytest.raises(shoal.WorkerFailed, match="worker 0 failed: RuntimeError: saving failed"):
        run_loop("--late", "raise", script=OWN_LOOP)


@pytest.mark.slow
@pytest.mark.soak  # tests/api/test_epochs.py resumes a loop
@pytest.mark.parametrize(("strategy", "options"), [("local", {"period": "5"}), ("sync", {})])
@warm
def test_a_loop_of_one_s_own_resumes_bit_for_bit(strategy, options, tmp_path, monkeypatch):
    """With dropout, momentum, an epoch-wise schedule and a second loader."""
    monkeypatch.setenv("SAME_START", "1")
    settings = {"script": OWN_LOOP, "strategy": strategy, "strategy_options": options}
    saved = {"checkpoint": str(tmp_path), "every": 4, **settings}
    straight = run_loop(**settings)
    with pytest.raises(shoal.WorkerFailed, match="exit code 9"):
        run_loop("--stop-after", "11", **saved)
    resumed = run_loop(**saved)
    assert "steps 18" in straight[0] and "steps 18" in resumed[0]
    assert torch.equal(final_weights(resumed[0]), final_weights(straight[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "bmuf",
        "asgd",
        *(pytest.param(w, marks=pytest.mark.soak) for w in ("sync", "diloco", "easgd", "gossip")),
    ],
)
@warm
def test_what_the_optimizer_does_not_hold_starts_equal_and_stays(strategy):
    printed = run_loop("--last-layer", "--steps", "20", strategy=strategy)
    first, last = slice(8 * 16 + 16), slice(8 * 16 + 16, None)
    start, *_ = (final_weights(lines, "start") for lines in printed)
    for lines in printed:
        assert torch.equal(final_weights(lines)[first], start[first])
        assert not torch.equal(final_weights(lines)[last], start[last])


def test_only_what_the_optimizer_holds_travels():
    model, xs, ys = model_and_data()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with shoal.attach(model, optimizer) as training:
        assert training.node.x.numel() == 16 * 3 + 3
        train(model, optimizer, xs, ys)
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_a_layer_that_is_frozen_after_attach_stays_whatever_the_weight_decay():
    models = []
    for attaches in (False, True):
        model, xs, ys = model_and_data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        with shoal.attach(model, optimizer) if attaches else contextlib.nullcontext():
            train(model, optimizer, xs[:10], ys[:10])
            model[0].requires_grad_(False)
            train(model, optimizer, xs[10:], ys[10:])
        models.append(model)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_what_is_trained_may_not_change_after_attach():
    model, xs, ys = model_and_data()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen at attach\(\) is trainable now"):
        train(model, optimizer, xs[:1], ys[:1])
    training.abandon()

    model, xs, ys = model_and_data()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match=r"held 2 parameters at attach\(\), and holds 4 now, or others"):
        train(model, optimizer, xs[:1], ys[:1])
    training.abandon()


@steps_never
def test_finish_after_a_step_that_failed_raises_its_error_again():
    model, xs, ys = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    with pytest.raises(shoal.Diverged) as first:
        train(model, optimizer, xs[:1] * float("inf"), ys[:1])
    for _ in range(2):
        with pytest.raises(shoal.Diverged) as again:
            training.finish()
        assert again.value is first.value
    shoal.attach(model, optimizer).finish()  # it let go of both


def test_a_step_after_one_that_failed_raises_the_same_error():
    model, xs, ys = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    for _ in range(2):
        with pytest.raises(shoal.Diverged):
            train(model, optimizer, xs[:1] * float("inf"), ys[:1])
    with pytest.raises(shoal.Diverged):
        training.finish()


@pytest.mark.slow
@warm
def test_freezing_after_attach_is_refused_where_the_strategy_would_still_move_it(tmp_path):
    script = tmp_path / "freezes.py"
    script.write_text(FREEZES)
    run_loop(script=script, strategy="sync")
    for strategy in ("bmuf", "gossip"):
        with pytest.raises(shoal.WorkerFailed, match=r"frozen after attach\(\), and \w+ would still move it"):
            run_loop(script=script, strategy=strategy)


@pytest.mark.slow
@warm
def test_weights_changed_beside_the_optimizer_are_refused_or_stay(tmp_path):
    script = tmp_path / "changes.py"
    script.write_text(CHANGES)
    for printed in run_loop(script=script, strategy="local", strategy_options={"period": "4"}):
        assert "all ones True" in printed
    for strategy, options in (("asgd", {}), ("bmuf", {"period": "4", "overlap": "1"})):
        with pytest.raises(shoal.WorkerFailed, match=r"the loop changed weights .* before step \d+, and"):
            run_loop(script=script, strategy=strategy, strategy_options=options)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mostly_soak(["sgp", "dpsgd", "adpsgd"], few=2))
@warm
def test_so_they_are_among_neighbours_who_mix_what_was_before(strategy, tmp_path):
    script = tmp_path / "changes.py"
    script.write_text(CHANGES)
    with pytest.raises(
        shoal.WorkerFailed, match=r"the loop changed weights .* before step 13, and \w+ would"
    ):
        run_loop(script=script, strategy=strategy)


@pytest.mark.slow
@warm
def test_who_waits_for_a_worker_that_gave_up_is_told_at_once(tmp_path):
    script = tmp_path / "gives_up.py"
    script.write_text(GIVES_UP)
    with pytest.raises(shoal.ShoalError, match="has no result: every worker left before the end"):
        run_loop(script=script, timeout=60.0)
    assert (tmp_path / "0").read_text() == "PeerLost"
    assert (tmp_path / "1").read_text() == "KeyError"


def test_parameters_that_are_not_the_model_s_are_refused():
    model, head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="also holds 2 parameters that are not the model's"):
        shoal.attach(model, optimizer)


def test_a_slip_in_the_strategy_s_name_is_found_by_a_single_worker():
    model, _, _ = model_and_data()
    with pytest.raises(ValueError, match="Did you mean 'bmuf'"):
        shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "bmfu")


# -- what the loop may do --------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_set_to_zero_or_to_none(set_to_none):
    model, xs, ys = model_and_data()
    plain = copy.deepcopy(model)

    def loop(model, optimizer):
        for x, y in zip(xs, ys, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.attach(model, optimizer):
        loop(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_lbfgs_is_left_alone_with_one_worker():
    def fit(model, optimizer, xs, ys):
        losses = []
        for x, y in zip(xs[:4], ys[:4], strict=True):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        return losses

    model, xs, ys = model_and_data()
    plain = copy.deepcopy(model)
    expected = fit(plain, torch.optim.LBFGS(plain.parameters(), max_iter=5), xs, ys)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    with shoal.attach(model, optimizer):
        assert fit(model, optimizer, xs, ys) == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_parameter_without_a_gradient_and_sparse_ones_are_stepped_as_in_plain_torch():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
            self.unused = nn.Linear(4, 4)
            self.used = nn.Linear(4, 2)

        def forward(self, x):
            return self.used(self.words(x).mean(1))

    def fit(model, optimizers):
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(model(torch.arange(6).view(3, 2) + step % 3), torch.tensor([0, 1, 0])).backward()
            for optimizer in optimizers:
                optimizer.step()

    torch.manual_seed(0)
    model = Words()
    for make in (torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)):
        plain, ours = copy.deepcopy(model), copy.deepcopy(model)
        fit(plain, [make(plain.parameters(), lr=0.1)])
        optimizer = make(ours.parameters(), lr=0.1)
        with shoal.attach(ours, optimizer):
            fit(ours, [optimizer])
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
