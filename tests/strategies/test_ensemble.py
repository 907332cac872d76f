"""An ensemble: models that never meet, whose predictions are averaged."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from sampling import mostly_soak
from shoal.core.task import Data, Task
from shoal.replicas.module import EnsembleModel, build_member, build_model
from shoal.runs.evaluation import evaluate
from shoal.sim import Compute, Faults, Network
from shoal.strategies import Ensemble, Single
from shoal.testing import blobs
from shoal.testing.problems import Slope, simulate
from shoal.vocabulary.strategy import Setting

SIM = {"transport": "sim"}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def random_members(number: int, classes: int = 5) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(3, classes) for _ in range(number)]


X = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randint(5, (200,), generator=torch.Generator().manual_seed(2))


# -- the module ------------------------------------------------------------------------------------


def test_the_mean_of_two_predictions_by_hand():
    members = [nn.Linear(1, 2, bias=False) for _ in range(2)]
    for member, odds in zip(members, (1.0, 3.0), strict=True):  # of class 0 to class 1, at x = 1
        member.weight.data = torch.tensor([[odds], [1.0]]).log()
    p = EnsembleModel(members, classes=True)(torch.ones(1, 1)).exp()
    assert p.tolist() == [[pytest.approx((1 / 2 + 3 / 4) / 2), pytest.approx((1 / 2 + 1 / 4) / 2)]]


def test_its_outputs_are_log_probabilities_that_sum_to_one():
    out = EnsembleModel(random_members(4), classes=True)(X)
    assert torch.allclose(out.exp().sum(dim=1), torch.ones(len(X)), atol=1e-6)
    mean = torch.stack([F.softmax(member(X), dim=1) for member in random_members(4)]).mean(dim=0)
    assert torch.allclose(out.exp(), mean, atol=1e-6)


def test_cross_entropy_takes_them_as_they_are():
    out = EnsembleModel(random_members(3), classes=True)(X)
    assert torch.allclose(F.cross_entropy(out, Y), F.nll_loss(out, Y), atol=1e-6)


@pytest.mark.parametrize("number", [2, 3, 8])
def test_its_cross_entropy_is_at_most_the_mean_of_its_members(number):
    members = random_members(number)
    own = [F.cross_entropy(member(X), Y).item() for member in members]
    mean = F.cross_entropy(EnsembleModel(members, classes=True)(X), Y).item()
    assert mean <= sum(own) / number
    per_sample = torch.stack([F.cross_entropy(member(X), Y, reduction="none") for member in members])
    each = F.cross_entropy(EnsembleModel(members, classes=True)(X), Y, reduction="none")
    assert bool((each <= per_sample.mean(dim=0) + 1e-6).all())  # Jensen holds for every sample


def test_identical_members_predict_what_one_does():
    (member,) = random_members(1)
    out = EnsembleModel([member] * 4, classes=True)(X)
    assert torch.allclose(out, F.log_softmax(member(X), dim=1), atol=1e-6)


def test_members_that_are_sure_of_different_classes_give_no_infinities():
    members = [nn.Linear(1, 2, bias=False) for _ in range(2)]
    members[0].weight.data = torch.tensor([[1000.0], [0.0]])
    members[1].weight.data = torch.tensor([[0.0], [1000.0]])
    out = EnsembleModel(members, classes=True)(torch.ones(1, 1))
    assert out.exp().tolist() == [[0.5, 0.5]]


def test_where_labels_are_no_classes_outputs_are_averaged_as_they_are():
    members = random_members(3, classes=1)
    mean = torch.stack([member(X) for member in members]).mean(dim=0)
    assert torch.allclose(EnsembleModel(members, classes=False)(X), mean)


def test_an_average_of_the_weights_is_something_else():
    """Two networks that compute the same with their hidden units swapped: in the middle lies nonsense."""

    def network(order):
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        first.weight.data = torch.tensor([[4.0, 0.0], [0.0, 4.0]])[order]
        second.weight.data = torch.tensor([[4.0, -4.0], [-4.0, 4.0]])[:, order]
        return nn.Sequential(first, nn.Tanh(), second)

    one, other = network([0, 1]), network([1, 0])
    middle = network([0, 1])
    for p, a, b in zip(middle.parameters(), one.parameters(), other.parameters(), strict=True):
        p.data = (a.data + b.data) / 2
    x = torch.tensor([[1.0, 0.0]])
    assert torch.equal(one(x), other(x))
    assert torch.allclose(EnsembleModel([one, other], classes=True)(x), F.log_softmax(one(x), dim=1))
    assert middle(x).abs().max() < 1e-6  # knows nothing


# -- training --------------------------------------------------------------------------------------


def test_workers_go_their_own_ways_and_never_talk():
    run = simulate(Ensemble(), Slope(lr=0.5, gradients=(1.0, 3.0)), workers=2, steps=4)
    assert [run.worker(k).x.item() for k in (0, 1)] == [-0.5 * 4 * 1, -0.5 * 4 * 3]
    assert [run.worker(k).meter.messages_sent for k in (0, 1)] == [0, 0]


def test_a_slow_worker_holds_nobody_up():
    run = simulate(Ensemble(), Slope(), workers=2, steps=4, compute=Compute(1.0, slow={1: 5.0}))
    assert run.seconds == 20.0
    assert [run.worker(k).meter.wait_seconds for k in (0, 1)] == [0.0, 0.0]


def test_one_member_is_single():
    ensemble = shoal.run(blobs(), "ensemble", epochs=3, **SIM)
    single = shoal.run(blobs(), "single", epochs=3, **SIM)
    assert torch.equal(flat(ensemble.model), flat(single.model))
    assert ensemble.test_accuracy == single.test_accuracy
    assert ensemble.test_loss == pytest.approx(single.test_loss, abs=1e-6)  # log-softmax once more
    assert ensemble.samples == single.samples


def test_members_begin_at_different_weights_of_their_own_rank_and_seed():
    task = blobs()
    starts = [flat(build_member(task, Ensemble(), rank, seed=0)) for rank in range(3)]
    assert torch.equal(starts[0], flat(build_model(task, 0)))
    assert len({tuple(start.tolist()) for start in starts}) == 3
    assert torch.equal(starts[2], flat(build_member(task, Ensemble(), 2, seed=0)))
    assert not torch.equal(starts[2], flat(build_member(task, Ensemble(), 2, seed=1)))
    assert torch.equal(flat(build_member(task, Single(), 2, seed=0)), starts[0])


def test_the_figures_are_those_of_the_averaged_predictions():
    task = blobs()
    result = shoal.run(task, "ensemble", workers=3, epochs=4, **SIM)
    assert isinstance(result.model, EnsembleModel)
    members, data = list(result.model.members), task.data()
    assert len({tuple(flat(member).tolist()) for member in members}) == 3
    score = evaluate(result.model, task, data)
    assert (result.test_loss, result.test_accuracy) == (score.loss, score.accuracy)
    own = [evaluate(member, task, data).loss for member in members]
    assert result.test_loss < sum(own) / 3
    for member in members:
        member.eval()
    with torch.no_grad():
        votes = torch.stack([F.softmax(member(data.test_x), dim=1) for member in members]).mean(dim=0)
    assert result.test_accuracy == 100 * (votes.argmax(dim=1) == data.test_y).double().mean().item()


def test_nothing_is_sent_and_every_sample_is_trained_on_once():
    result = shoal.run(blobs(), "ensemble", workers=4, epochs=3, network=Network(latency=5.0), **SIM)
    assert result.bytes_sent == 0
    assert result.wait_fraction == 0
    assert result.samples == 3 * 300
    assert (result.curve[0]["samples"], result.curve[-1]["samples"]) == (0, 900)
    assert len(result.curve) > 10


def test_with_all_data_every_member_takes_all_samples():
    result = shoal.run(blobs(), Ensemble(all_data=True), workers=3, epochs=2, **SIM)
    assert [node["samples"] for node in result.nodes] == [600] * 3
    assert result.samples == result.curve[-1]["samples"] == 1800
    single = shoal.run(blobs(), "single", epochs=2, **SIM)
    assert torch.equal(flat(result.model.members[0]), flat(single.model))


@pytest.mark.parametrize("strategy", mostly_soak([Ensemble(all_data=True), Ensemble()], few=1), ids=repr)
def test_resuming_is_bit_equal(strategy, tmp_path):
    shoal.run(blobs(), strategy, workers=3, epochs=1, checkpoint=tmp_path, **SIM)
    resumed = shoal.run(blobs(), strategy, workers=3, epochs=3, checkpoint=tmp_path, every=4, **SIM)
    straight = shoal.run(blobs(), strategy, workers=3, epochs=3, **SIM)
    assert torch.equal(flat(resumed.model), flat(straight.model))
    assert resumed.curve[-1] == straight.curve[-1] | {"seconds": resumed.curve[-1]["seconds"]}


def test_a_saved_ensemble_can_be_read_back(tmp_path):
    task = blobs()
    result = shoal.run(task, "ensemble", workers=2, checkpoint=tmp_path, every=5, **SIM)
    fresh = EnsembleModel([build_model(task, seed) for seed in (7, 8)], classes=True)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(flat(fresh), flat(result.model))
    assert not list(tmp_path.glob("step-*/model.safetensors"))  # no node has more than its own


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def test_every_member_keeps_its_own_buffers():
    result = shoal.run(replace(blobs(), model=norm), "ensemble", workers=2, epochs=2, **SIM)
    means = [member[1].running_mean for member in result.model.members]
    assert not torch.equal(means[0], means[1])
    assert result.test_accuracy > 80


def line() -> nn.Module:
    return nn.Linear(1, 1)


def along() -> Data:
    x = torch.linspace(-1, 1, 64)[:, None]
    return Data(x, 3 * x + 1, x, 3 * x + 1)


def test_a_regression_has_no_accuracy_and_averages_outputs():
    task = Task("line", line, along, loss=F.mse_loss, lr=0.2, batch=4)
    result = shoal.run(task, "ensemble", workers=2, epochs=10, **SIM)
    assert result.test_accuracy is None
    assert result.test_loss < 1e-2


def test_a_worker_that_dies_is_done_without():
    faults = Faults().crash(rank=1, step=3)
    result = shoal.run(blobs(), "ensemble", workers=3, epochs=3, faults=faults, **SIM)
    assert len(result.model.members) == 2
    assert result.test_accuracy > 75


# -- on processes ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_processes_learn_the_same():
    task = replace(blobs(), model=norm)
    real = shoal.run(task, "ensemble", workers=2, epochs=2)
    virtual = shoal.run(task, "ensemble", workers=2, epochs=2, **SIM)
    state, expected = real.model.state_dict(), virtual.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert (real.test_loss, real.test_accuracy) == (virtual.test_loss, virtual.test_accuracy)
    assert real.bytes_sent == 0
    assert real.curve[-1]["samples"] == 600


# -- refusals --------------------------------------------------------------------------------------


def test_a_codec_with_nothing_to_compress_is_refused():
    with pytest.raises(ValueError, match=r"Ensemble sends nothing, so FP16\(\) would do nothing"):
        shoal.run(blobs(), "ensemble", workers=2, codec="fp16", **SIM)


def test_a_loop_of_one_s_own_is_refused():
    with pytest.raises(ValueError, match="start the script several times with seeds of its own"):
        Ensemble().check(Setting(4, own_loop=True))
