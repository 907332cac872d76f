"""What the workers of a script hold together: the same model and buffers in the end, and on the way."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak
from scripts import final_weights, run_loop
from shoal.api.script import run_script
from shoal.core.errors import WorkerFailed
from shoal.launch.environment import Place
from shoal.strategies import STRATEGIES

run = partial(run_loop, script=Path(__file__).with_name("together.py"))
WORDS = ["sync", "bmuf", "diloco", "gossip", "easgd", "asgd", "ssp", "sync_server", "downpour", "hogwild"]

pytestmark = pytest.mark.usefixtures("warm_scripts")


@pytest.mark.parametrize("strategy", mostly_soak(WORDS, few=2))
def test_every_worker_ends_with_the_same_model_and_buffers(strategy):
    printed = run("--look", "0", workers=3, strategy=strategy)
    models = [final_weights(text) for text in printed]
    assert all(torch.equal(models[0], model) for model in models)
    ends = torch.stack([final_weights(text, "buffers") for text in printed])
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    own = torch.stack([final_weights(text, "own") for text in printed])
    assert torch.allclose(ends[0][:12], own.mean(0)[:12])  # mean and variance of six features
    assert ends[0][12] == own[0][12]  # batches counted: worker 0's
    assert not torch.allclose(own[0][:6], own[1][:6], atol=0.1)  # the control: their inputs differ
    before, common, after = (final_weights(printed[0], word) for word in ("before", "common", "after"))
    assert torch.equal(before, after)
    if strategy in ("sync", "gossip", "diloco"):  # with a server, others may have pushed meanwhile, or not
        assert torch.equal(before, common) is (strategy != "diloco")


@pytest.mark.parametrize(("how", "row"), mostly_soak([("first", 0), ("own", 1)], few=1))
def test_buffers_may_be_worker_0_s_or_each_worker_s_own(how, row):
    printed = run("--buffers", how, workers=2, strategy="asgd")
    own = [final_weights(text, "own") for text in printed]
    assert torch.equal(final_weights(printed[1], "buffers"), own[row])


def test_workers_on_the_same_batches_are_noticed():
    printed = run("--same-batches", workers=2)
    assert "workers 0 and 1 computed the same first gradient" in printed[0]
    assert "shoal.shard(loader)" in printed[0]


@pytest.mark.parametrize("strategy", mostly_soak(["asgd", "sync", "gossip"], few=1))
def test_workers_on_different_batches_are_not(strategy):
    assert all("first gradient" not in text for text in run(strategy=strategy))


BATCH_NORM = """
import torch, shoal
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))
shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_sync_batch_norm_is_refused_where_it_would_not_talk(tmp_path):
    script = tmp_path / "norm.py"
    script.write_text(BATCH_NORM)
    with pytest.raises(WorkerFailed, match="SyncBatchNorm talks to the other workers"):
        run_loop(script=script)


def test_a_step_on_the_common_model_is_refused():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    model(torch.ones(3, 2)).sum().backward()
    with training.common_model(), pytest.raises(ValueError, match="inside common_model"):
        optimizer.step()
    optimizer.step()
    training.finish()
    with training.common_model() as common:
        assert common is model


NO_FINISH = """
import sys, torch, shoal
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = shoal.attach(model, optimizer)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((1, 2), 1.0 + training.rank)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("strategy", "warns"), [("local", True), ("sync", False)])
def test_a_script_that_leaves_finish_to_its_end_is_told_where_that_changes_the_model(
    strategy, warns, tmp_path
):
    script = tmp_path / "ends.py"
    script.write_text(NO_FINISH)
    printed = run_loop(script=script, strategy=strategy)
    assert all(("the script ended without training.finish()" in text) is warns for text in printed)


STATISTICS = """
import torch, shoal
class Norm(torch.nn.Module):  # as Keras keeps its statistics
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.moving_mean = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.fixed = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
model = Norm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = shoal.attach(model, optimizer)
model.scale.sum().backward()
optimizer.step()
with torch.no_grad():
    model.moving_mean += 1 + training.rank
    model.fixed += 1 + training.rank
training.finish()
print("statistics", model.moving_mean.tolist())
print("fixed", model.fixed.tolist())
"""


def test_statistics_that_a_model_keeps_as_parameters_are_averaged(tmp_path):
    script = tmp_path / "norm.py"
    script.write_text(STATISTICS)
    printed = run_loop(script=script, workers=3)
    for rank, text in enumerate(printed, 1):
        assert "statistics [2.0, 2.0]" in text
        assert f"fixed [{rank}.0, {rank}.0]" in text  # what a script changes by itself stays its own


def test_unknown_ways_to_merge_buffers_are_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="buffers='median' must be one of mean, first, own"):
        shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers="median")


UNUSED = """
import torch, shoal
model = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
training = shoal.attach(model, optimizer{unused})
before = model[1].weight.detach().clone()
for step in range(3):
    optimizer.zero_grad()
    model[0](torch.randn(4, 3) + training.rank).mean().backward()
    optimizer.step()
training.finish()
print("moved by", float((model[1].weight - before).abs().max()))
"""
REFUSAL = "parameter '1.weight' has no gradient in this step. (Sync|ASGD) merges whole gradients, and AdamW"


def run_unused(tmp_path, strategy, optimizer, unused=""):
    script = tmp_path / "unused.py"
    script.write_text(UNUSED.format(optimizer=optimizer, unused=unused))
    lines = []
    run_script(
        script,
        (),
        workers=2,
        strategy=STRATEGIES.make(strategy),
        place=Place(strategy=strategy),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.append(line),
    )
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("moved by")]


@pytest.mark.parametrize("strategy", mostly_soak(["asgd", "sync"], few=1))
def test_a_parameter_without_a_gradient_that_would_still_be_moved_is_refused(strategy, tmp_path):
    with pytest.raises(WorkerFailed, match=REFUSAL):
        run_unused(tmp_path, strategy, "AdamW")


@pytest.mark.parametrize(
    ("optimizer", "strategy"), mostly_soak([("Adagrad", "asgd"), ("SGD", "sync"), ("AdamW", "bmuf")], few=1)
)
def test_a_parameter_without_a_gradient_stays_where_it_was(optimizer, strategy, tmp_path):
    assert run_unused(tmp_path, strategy, optimizer) == [0.0, 0.0]


def test_a_parameter_without_a_gradient_is_stepped_along_zeros_if_the_script_says_so(tmp_path):
    moved = run_unused(tmp_path, "sync", "AdamW", ', unused="zeros"')
    assert moved[0] == moved[1] > 0  # by weight decay


def test_unknown_words_for_unused_parameters_are_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="unused='skip' must be one of refused, zeros"):
        shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), unused="skip")


LAST_ROUNDS = [
    ("hierarchical", {"groups": "3", "collect": "4"}, 1),
    ("softsync", {"collect": "5"}, 2),
    ("ssp", {"bound": "1"}, 2),
]


@pytest.mark.parametrize(("strategy", "options", "servers"), mostly_soak(LAST_ROUNDS, few=1))
def test_all_take_the_model_with_every_round_closed_at_every_server(strategy, options, servers):
    printed = run(workers=3, strategy=strategy, strategy_options=options, servers=servers)
    models = [final_weights(text) for text in printed]
    assert all(torch.equal(models[0], model) for model in models)


TWO = """
import sys, torch, shoal
torch.manual_seed(0)
first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.1)]
training = shoal.attach([first, second], optimizers)
for step in range(4 + training.rank * int(sys.argv[1])):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + training.rank))
    for optimizer in optimizers:
        optimizer.zero_grad()
        second(torch.tanh(first(x))).square().mean().backward()
        optimizer.step()
training.finish()
flat = torch.nn.utils.parameters_to_vector([*first.parameters(), *second.parameters()]).detach()
print(f"weights {flat.numpy().tobytes().hex()}")
"""


def test_different_optimizers_of_one_script_train_alike_at_a_server_and_at_the_workers(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    at_workers, at_server = (run_loop("0", script=script, strategy=word) for word in ("sync", "sync_server"))
    assert torch.allclose(final_weights(at_workers[0]), final_weights(at_server[0]), atol=1e-6)


def test_several_optimizers_go_on_when_the_data_of_one_worker_has_ended(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    first, second = (final_weights(text) for text in run_loop("3", script=script))
    assert torch.equal(first, second)


MIXING = [("softsync", {}), ("downpour", {"n_push": "2"}), ("eamsgd", {}), ("slowmo", {})]


@pytest.mark.parametrize(("strategy", "options"), mostly_soak(MIXING, few=2))
def test_strategies_that_mix_steps_refuse_several_optimizers(strategy, options, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    with pytest.raises(WorkerFailed, match="mixes steps that may be of different optimizers"):
        run_loop("0", script=script, strategy=strategy, strategy_options=options)
