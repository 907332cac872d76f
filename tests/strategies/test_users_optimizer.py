"""The user's optimizer at the server: it is the script's own, in every group, on its schedule."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import shoal
from loops import OPTIMIZERS, STEPS, LoopReplica, trained_plainly
from sampling import covering, mostly_soak, sampled
from shoal.core.identity import NodeIdentity
from shoal.engine.protocol import Push
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.optimizer import steps_each_element
from shoal.replicas.served import check_optimizer
from shoal.sim.disk import Disk
from shoal.sim.faults import Faults
from shoal.sim.models import Compute, Network
from shoal.sim.simulation import Simulation
from shoal.strategies import (
    ASGD,
    DCASGD,
    SSP,
    DecoupledMomentum,
    Downpour,
    Hierarchical,
    Hogwild,
    MuLoCo,
    SoftSync,
    StalenessAware,
    Sync,
    SyncServer,
)
from shoal.testing import blobs
from shoal.vocabulary.gathering import Gathering

PROMISED = [ASGD(), SSP(), SyncServer(), Downpour()]
OTHERS = [SoftSync(), StalenessAware(), DCASGD(strength=0.0), Hierarchical(groups=1)]
SHARDS = [1, 2]
ONE_WORKER = [
    *covering([*product(OPTIMIZERS, [*product(PROMISED, SHARDS)])], each=1),
    *covering([*product(["momentum", "adamw"], [*product(OTHERS, SHARDS)])], each=3),
]
WAITING = [
    *mostly_soak([*product(OPTIMIZERS, [SyncServer()], SHARDS)], few=2),
    *sampled(["adamw"], [SoftSync(wait=True), Hierarchical(2)], SHARDS),
]


def simulated(strategy, word, workers=1, **options):
    template = LoopReplica(word)
    return Simulation(
        strategy,
        lambda rank: LoopReplica(word, rank, workers),
        workers=workers,
        steps=STEPS,
        served=template.served,
        centre=template.x,
        layout=template.layout,
        compute=Compute(mean=1.0),
        network=Network(latency=0.01),
        **options,
    ).run()


@pytest.mark.parametrize(("word", "strategy", "shards"), ONE_WORKER, ids=str)
def test_with_one_worker_it_is_plain_torch(word, strategy, shards):
    assert torch.equal(simulated(strategy, word, shards=shards).solution, trained_plainly(word))


@pytest.mark.parametrize(
    ("word", "snapshot_every"), mostly_soak([*product(OPTIMIZERS, [1, 7, 1000])], few=5)
)  # from snapshots, from both, from the journal
def test_a_server_that_dies_and_comes_back_still_has_the_optimizer_s_state(word, snapshot_every):
    run = simulated(
        ASGD(),
        word,
        shards=2,
        disk=lambda rank: Disk(snapshot_every=snapshot_every),
        faults=Faults(noticed_after=0.1, restart_after=0.5).kill(rank=1, moment=12.5),
    )
    assert run.nodes[1].incarnation == 1
    assert torch.equal(run.solution, trained_plainly(word))


@pytest.mark.parametrize(("word", "strategy", "shards"), WAITING)
def test_who_waits_for_all_at_a_server_trains_as_sync_does(word, strategy, shards):
    at_the_workers = simulated(Sync(), word, workers=3).worker(0).x
    at_the_server = simulated(strategy, word, workers=3, shards=shards).solution
    # the order of a sum of three, and adaptive steps that divide by its size
    assert torch.allclose(at_the_server, at_the_workers, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("word", mostly_soak([*OPTIMIZERS], few=3))
def test_a_hogwild_worker_adds_the_steps_of_its_own_optimizer(word):
    assert torch.allclose(simulated(Hogwild(), word).solution, trained_plainly(word), rtol=1e-5, atol=1e-6)


def test_no_stale_synchronous_update_is_hidden_from_the_optimizer():
    """Two workers in step, with a bound of 0: one of two updates is always hidden, and none is lost."""
    together, apart = (simulated(SSP(bound=b), "adamw", workers=2).solution for b in (0, None))
    assert torch.allclose(together, apart, rtol=0.1, atol=0.05)
    assert not torch.equal(together, apart)  # the control: hidden updates were seen later


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_torch_s_optimizers_may_be_cut(word):
    assert steps_each_element(LoopReplica(word).loop.optimizer)


class ByNorm(torch.optim.Optimizer):
    """The user's own, as LARS: the step of a tensor depends on its norm."""

    def __init__(self, params, lr, decay=0.0):
        super().__init__(params, {"lr": lr})
        self.decay = decay  # not in a group

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() + self.decay * p, alpha=group["lr"])


class Signs(ByNorm):
    """The user's own, element by element."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = self.state[p].get("seen", torch.zeros_like(p)) + p.grad
                    p.sub_(self.state[p]["seen"].sign() + self.decay * p, alpha=group["lr"])


WHOLE = [partial(ByNorm, lr=0.1), torch.optim.Muon, torch.optim.Adafactor]


@pytest.mark.parametrize("make", WHOLE, ids=["by norm", "muon", "adafactor"])
def test_an_optimizer_that_needs_whole_tensors_is_refused_with_several_servers(make):
    optimizer = make([nn.Parameter(torch.randn(4, 3))])
    check_optimizer(ASGD(), optimizer, 2, 1)
    with pytest.raises(
        ValueError, match=r"looks at whole tensors, and each of 2 servers .* take --servers 1"
    ):
        check_optimizer(ASGD(), optimizer, 2, 2)


@pytest.mark.parametrize(
    "make", [*WHOLE, partial(Signs, lr=0.1)], ids=["by norm", "muon", "adafactor", "signs"]
)
def test_one_server_steps_whole_tensors(make):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    plain = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), make(plain.parameters())
    server = AttachedReplica(model, ours).served(NodeIdentity(1, 1, servers=1))
    start = server.x.clone()
    for _ in range(3):
        plain.weight.grad = torch.randn(3, 4)
        theirs.step()
        server.apply(plain.weight.grad.flatten(), ours.param_groups[0]["lr"], None, 1.0)
    assert torch.equal(server.x, plain.weight.detach().flatten())
    assert not torch.equal(server.x, start)


def test_the_user_s_own_optimizer_may_be_cut_and_keeps_its_attributes():
    model = nn.Linear(4, 3)
    optimizer = Signs(model.parameters(), lr=0.1, decay=0.5)
    check_optimizer(ASGD(), optimizer, 2, 2)
    replica = AttachedReplica(model, optimizer)
    server = replica.served(NodeIdentity(2, 1, servers=1, shards=2))
    before = server.x.clone()
    server.apply(torch.ones_like(server.x), 0.2, None, 1.0)
    assert torch.allclose(server.x, before - 0.2 * (1 + 0.5 * before))


def test_a_state_that_the_script_has_loaded_goes_to_the_servers():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # its momentum is 2 everywhere now
    server = AttachedReplica(model, optimizer).served(NodeIdentity(2, 1, servers=1, shards=2))
    before = server.x.clone()
    server.apply(torch.ones_like(server.x), 0.1, None, 1.0)
    assert torch.allclose(before - server.x, torch.full_like(before, 0.1 * (0.5 * 2 + 1)))


class Counts(torch.optim.Optimizer):
    """The user's own: the step depends on a number in the group that it counts itself."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["count"])


def served(make, shards=1, rank=1):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = make(model.parameters())
    replica = AttachedReplica(model, optimizer)
    return replica, optimizer, replica.served(NodeIdentity(rank, 1, servers=1, shards=shards))


def test_a_number_that_the_optimizer_counts_itself_is_its_own():
    _, _, server = served(partial(Counts, lr=1.0))
    start, ones = server.x.clone(), torch.ones(12)
    server.apply(ones, 1.0, None, 1.0)
    saved = copy.deepcopy(server.state_dict())
    server.apply(ones, 1.0, None, 1.0)
    assert torch.allclose(start - server.x, torch.full((12,), 1 + 1 / 2))
    _, _, successor = served(partial(Counts, lr=1.0))
    successor.x.copy_(start - 1)
    successor.load_state_dict(saved)
    successor.apply(ones, 1.0, None, 1.0)
    assert torch.allclose(successor.x, server.x)


def test_what_servers_cannot_follow_is_refused():
    replica, optimizer, _ = served(partial(Signs, lr=0.1))
    assert replica.changed is None
    optimizer.decay = 0.5
    with pytest.raises(ValueError, match=r"an attribute of the optimizer, or an option .* was changed after"):
        _ = replica.changed
    replica.tells_servers = False  # where every worker steps itself
    assert replica.changed is None


def clipped(optimizer):
    original = optimizer.step
    optimizer.step = lambda: original()


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [clipped, hooked])
def test_steps_with_code_of_the_user_s_around_them_stay_at_the_worker(change):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # which wraps the step, too
    check_optimizer(ASGD(), optimizer, 2, 1)
    change(optimizer)
    check_optimizer(Sync(), optimizer, 2, 1)
    with pytest.raises(ValueError, match=r"step hooks and a step\(\) of your own would not see your model"):
        check_optimizer(ASGD(), optimizer, 2, 1)


@pytest.mark.parametrize("lr", [0.0, 1e-8, 0.1, 10.0])
def test_whether_a_tensor_may_be_cut_does_not_depend_on_the_rate(lr):
    whole, elements = (make([nn.Parameter(torch.randn(3, 2))], lr=lr) for make in (ByNorm, Signs))
    assert not steps_each_element(whole)
    assert steps_each_element(elements)
    assert steps_each_element(torch.optim.Adam([nn.Parameter(torch.randn(3, 2))], lr=lr))


def test_the_paper_s_rules_refuse_several_rates():
    parameters = [{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in (0.1, 0.2)]
    optimizer = torch.optim.SGD(parameters)
    check_optimizer(Downpour(), optimizer, 2, 1)
    with pytest.raises(ValueError, match="the server's rule of Downpour has one learning rate"):
        check_optimizer(Downpour(optimizer="adagrad"), optimizer, 2, 1)


@pytest.mark.parametrize("strategy", [DecoupledMomentum(), MuLoCo()])
@pytest.mark.parametrize("workers", [1, 2])
def test_strategies_that_step_themselves_refuse_several_rates(strategy, workers):
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in (0.1, 0.2)]
    with pytest.raises(ValueError, match=r"has one learning rate, and the groups of SGD have several"):
        check_optimizer(strategy, torch.optim.SGD(groups), workers, 1)
    groups[1]["lr"] = 0.1
    check_optimizer(strategy, torch.optim.SGD(groups), workers, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_weight_decay_that_would_do_nothing_is_refused(workers):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="the weight_decay of SGD would do nothing"):
        check_optimizer(DecoupledMomentum(), optimizer, workers, 1)
    check_optimizer(MuLoCo(), optimizer, workers, 1)
    task = replace(blobs(), optimizer=partial(torch.optim.SGD, weight_decay=0.1))
    with pytest.raises(ValueError, match="would do nothing"):
        shoal.run(task, "demo", workers=workers, transport="sim")


@pytest.mark.parametrize("count", [3.0, 7.0, 63.0])
def test_a_round_of_one_steps_exactly_as_its_sender_would(count):
    async def rate_of_a_round(s):
        gathering = Gathering(s)
        gathering.add(Push(parts=(torch.full_like(s.x, 0.3),), src=0, count=count, rate=0.1))
        mean, _ = gathering.close()
        return mean.rate, mean.body.clone()

    made = []

    class Once(SyncServer):
        async def server(self, s):
            made.append(await rate_of_a_round(s))
            await super().server(s)

    simulated(Once(), "sgd")
    ((rate, body),) = made
    assert rate == 0.1
    assert torch.equal(body, torch.full_like(body, 0.3))


def test_the_rate_is_found_behind_options_of_several_numbers():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    plain = copy.deepcopy(model)

    def make(module):
        return torch.optim.Adam([{"params": list(module.parameters()), "betas": (0.5, 0.6)}], lr=0.1)

    ours, theirs = make(model), make(plain)
    assert list(ours.param_groups[0])[:3] == ["params", "betas", "lr"]
    server = AttachedReplica(model, ours).served(NodeIdentity(1, 1, servers=1))
    for rate in (0.1, 0.02, 0.3):
        theirs.param_groups[0]["lr"] = rate
        for p in plain.parameters():
            p.grad = torch.randn_like(p)
        theirs.step()
        flat = torch.cat([p.grad.flatten() for p in plain.parameters()])
        server.apply(flat, rate, None, 1.0)
    assert torch.equal(server.x, torch.cat([p.detach().flatten() for p in plain.parameters()]))
