"""Scripts as users write them, under several strategies: all workers end with one model, rightly trained."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak
from scripts import final_weights, run_loop
from shoal.core.errors import WorkerFailed

FOLDER = Path(__file__).with_name("small_scripts")
STRATEGIES = ["sync", "bmuf", "diloco", "asgd", "gossip", "easgd"]
SCRIPTS = ["gan", "actor_critic", "teacher", "frozen", "tied", "accumulate", "autocast", "compiled", "sparse"]
SERVED_TOO = ("accumulate", "sparse", "tied")  # run with a server as well
ARGUMENTS = {"compiled": ("eager",)}  # the model is traced and wrapped, but no C++ is compiled
ROUNDED = {"autocast": 1e-2}
"""How far two workers may be from one on the same samples, where 1e-5 is too near: bfloat16 rounds."""

pytestmark = [
    pytest.mark.usefixtures("warm_scripts"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


def cases():
    """Every script with every strategy; those that the normal run leaves out are soak."""
    for script in SCRIPTS:
        usual = "asgd" if script in SERVED_TOO else "sync"
        for strategy in STRATEGIES:
            left_out = strategy != usual or script == "actor_critic"  # of two optimizers, as "gan" is
            yield pytest.param(script, strategy, marks=(pytest.mark.soak,) if left_out else ())


def run(script, *arguments, **options):
    return run_loop(*arguments, script=FOLDER / f"{script}.py", **options)


def run_here(script, *arguments, without_shoal=False):
    """What a script prints that is run by plain `python`; or without Shoal, its calls doing nothing."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(FOLDER)
        patch.setattr(sys, "argv", [script, *arguments])
        patch.setattr(
            torch, "compile", lambda model, backend: model
        )  # it is slow, and leaves processes behind
        if without_shoal:
            patch.setitem(sys.modules, "shoal", NOTHING)
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    return printed.getvalue()


NOTHING = SimpleNamespace(
    attach=lambda model, optimizer: SimpleNamespace(rank=0, workers=1, finish=lambda: None),
    shard=lambda loader: loader,
)
trained_alone = cache(partial(run_here, without_shoal=True))


@pytest.mark.parametrize(("script", "strategy"), [*cases()])
def test_all_workers_end_with_one_model_that_is_rightly_trained(script, strategy):
    first, second = run(script, *ARGUMENTS.get(script, ()), strategy=strategy)
    assert torch.equal(final_weights(first), final_weights(second))
    CHECKS.get(script, loss_fell)(strategy, first, second)
    if strategy == "sync":
        alone = final_weights(trained_alone(script))
        assert torch.allclose(final_weights(first), alone, rtol=0.0, atol=ROUNDED.get(script, 1e-5))


def loss_fell(strategy, first, second):
    before, after = next(line.split()[1:] for line in first.splitlines() if line.startswith("loss "))
    assert float(after) < 0.9 * float(before)


def both_nets_moved(strategy, first, second):
    assert (final_weights(first, "start") != final_weights(first)).all()


def teacher_follows(strategy, first, second):
    loss_fell(strategy, first, second)
    start, end, teacher = (final_weights(first, word) for word in ("start", "weights", "teacher"))
    assert (teacher - end).norm() < 0.5 * (start - end).norm()
    if strategy == "sync":
        assert torch.equal(teacher, final_weights(second, "teacher"))


def frozen_stayed(strategy, first, second):
    loss_fell(strategy, first, second)
    for text in (first, second):
        assert torch.equal(final_weights(text, "backbone"), final_weights(text, "backbone_before"))
        assert "pruned 48" in text


def still_tied(strategy, first, second):
    loss_fell(strategy, first, second)
    assert "tied True" in first and "tied True" in second


CHECKS = {"gan": both_nets_moved, "teacher": teacher_follows, "frozen": frozen_stayed, "tied": still_tied}


@pytest.mark.parametrize(
    "script", mostly_soak([*(name for name in SCRIPTS if name != "compiled"), "lbfgs"], few=4)
)
def test_with_plain_python_a_script_trains_as_without_shoal(script):
    assert run_here(script) == trained_alone(script)


@pytest.mark.soak
def test_a_model_of_the_usual_compiler_is_rightly_trained():
    """Which compiles C++, half a minute of it where nothing is cached."""
    first, second = run("compiled")
    assert torch.equal(final_weights(first), final_weights(second))
    assert torch.allclose(final_weights(first), final_weights(trained_alone("compiled")), rtol=0.0, atol=1e-5)


# -- optimizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", mostly_soak(["asgd", "sync"], few=1))
def test_a_net_is_moved_by_its_own_optimizer_alone(strategy):
    """The critic's learning rate is 0, and the generator's back-propagation leaves gradients in it."""
    first, _ = run("gan", "--critic-rate", "0", strategy=strategy)
    moved = final_weights(first, "start") != final_weights(first)
    critic = len(final_weights(first, "critic"))
    assert moved[:-critic].all() and not moved[-critic:].any()


@pytest.mark.parametrize("strategy", mostly_soak(["sync", "asgd"], few=1))
def test_lbfgs_is_refused_beyond_one_worker(strategy):
    with pytest.raises(WorkerFailed, match="LBFGS evaluates its closure several times in a step"):
        run("lbfgs", strategy=strategy)


def test_lbfgs_trains_on_one_worker_that_was_launched():
    (printed,) = run("lbfgs", workers=1)
    assert torch.equal(final_weights(printed), final_weights(trained_alone("lbfgs")))


@pytest.mark.parametrize("strategy", mostly_soak(["asgd", "sync"], few=1))
def test_sparse_adam_is_refused_beyond_one_worker(strategy):
    with pytest.raises(WorkerFailed, match="SparseAdam steps the rows that a sparse gradient has"):
        run("sparse", "sparse_adam", strategy=strategy)


def test_sparse_adam_is_left_alone_with_one_worker():
    assert run_here("sparse", "sparse_adam") == trained_alone("sparse", "sparse_adam")


@pytest.mark.parametrize("optimizer", mostly_soak(["adagrad", "sgd"], 1))
def test_sparse_gradients_train_as_dense_ones_do(optimizer):
    sparse, dense = (final_weights(run("sparse", optimizer, *more)[0]) for more in ((), ("dense",)))
    assert torch.allclose(sparse, dense, rtol=0.0, atol=1e-6)


GROUPS = """
import torch, shoal
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 0.3}]
optimizer = torch.optim.SGD(groups, momentum=0.9)
before = [p.detach().clone() for p in model.parameters()]
with shoal.attach(model, optimizer) as training:
    torch.manual_seed(training.rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
print("same", [a.equal(b) for a, b in zip(before, model.parameters())])
"""


@pytest.mark.parametrize(
    ("strategy", "servers"), mostly_soak([("asgd", 2), ("sync", 1), ("asgd", 1), ("easgd", 1)], 1)
)
def test_a_group_with_a_rate_of_0_stays_and_the_other_moves(strategy, servers, tmp_path):
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    for printed in run_loop(script=script, strategy=strategy, servers=servers):
        assert "same [True, True, False, False]" in printed


# -- several optimizers --------------------------------------------------------------------------------

OUT_OF_STEP = """
import torch, shoal
from torch import nn
models = [nn.Linear(4, 2), nn.Linear(4, 2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
training = shoal.attach(models, optimizers)
torch.manual_seed(training.rank)
for step in range(4):
    which = (step + training.rank) % 2
    models[which](torch.randn(3, 4)).sum().backward()
    optimizers[which].step()
"""


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [("sync", "workers stepped different optimizers"), ("sync_server", "gradients of several optimizers")],
)
def test_workers_that_step_different_optimizers_at_once_are_told(strategy, sentence, tmp_path):
    script = tmp_path / "out_of_step.py"
    script.write_text(OUT_OF_STEP)
    with pytest.raises(WorkerFailed, match=sentence):
        run_loop(script=script, strategy=strategy)


def test_softsync_keeps_two_optimizers_apart_if_workers_wait():
    first, second = run("gan", strategy="softsync", strategy_options={"wait": "true"})
    assert torch.equal(final_weights(first), final_weights(second))
    assert torch.allclose(final_weights(first), final_weights(trained_alone("gan")), rtol=0.0, atol=1e-5)


def test_the_step_of_one_optimizer_leaves_the_gradients_of_another():
    """They are accumulated where they lay, and a scaler has changed what was handed over."""

    def train(models, optimizers):
        scaler, draw = torch.amp.GradScaler("cpu", init_scale=8.0), torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(3, 4, generator=draw)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad(set_to_none=False)
                scaler.scale(model(x).square().sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

    plain = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    ours = copy.deepcopy(plain)
    train(plain, [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in ours]
    with shoal.attach(list(ours), optimizers):
        train(ours, optimizers)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("strategy", mostly_soak(["bmuf", "sync"], 1))
@pytest.mark.soak
def test_a_script_with_two_optimizers_resumes_bit_for_bit(strategy, tmp_path):
    saved = {"strategy": strategy, "checkpoint": str(tmp_path), "every": 6}  # two steps for each batch
    straight = run("gan", strategy=strategy)
    with pytest.raises(WorkerFailed, match="exit code 9"):
        run("gan", "--stop-after", "11", **saved)
    for before, after in zip(straight, run("gan", **saved), strict=True):
        assert torch.equal(final_weights(before), final_weights(after))
