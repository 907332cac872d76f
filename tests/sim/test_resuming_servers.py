"""Runs with servers that go on with other workers, or with other servers: every push is in the model once."""

import random
import shutil

import pytest
import torch
from tally import tally

from sampling import mostly_soak
from shoal.core.errors import CheckpointError
from shoal.core.identity import NodeIdentity
from shoal.engine.protocol import Checkpointed
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.sim import Compute, Faults, Simulation
from shoal.sim.transport import Switch
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.step_folders import step_folder, steps_in
from shoal.strategies import ASGD, SSP, Downpour, Hogwild, SoftSync, SyncServer
from shoal.testing.problems import Problem
from shoal.vocabulary.node import Node

PLAIN = {"optimizer": "sgd", "rate": 1.0, "warmup": 0}
STRATEGIES = [
    ASGD(),
    SSP(bound=2),
    Hogwild(),
    Downpour(n_push=3, n_fetch=2, fixed_shares=False, **PLAIN),
    Downpour(n_push=2, overlap=True, fixed_shares=False, **PLAIN),
    Downpour(n_push=3, **PLAIN),
]
EXACT = [
    strategy for strategy in STRATEGIES if strategy != Hogwild()
]  # its additions may be in before the server knows
UNEVEN = Compute(mean=1.0, jitter=0.2, slow={0: 2.5})


def run(folder, strategy, workers, shards=1, faults=None, **options):
    """A run that resumes if it can, and writes a checkpoint before every step."""
    saved = Checkpoints(folder, {}, 0, keep=1000, bound=None)
    between = BetweenSteps(Control(), saved, 1, solution=lambda engine: strategy.solution(Node(engine)))
    settings = {"samples": 40, "batch": 2, "compute": UNEVEN, "elastic": False, **options}
    return tally(
        faults,
        workers=workers,
        shards=shards,
        strategy=strategy,
        between_steps=between,
        before=between.resume_all,
        **settings,
    )


def only(folder, step, copy):
    """That checkpoint alone."""
    shutil.copytree(step_folder(folder, step), step_folder(copy, step))
    return copy


def whole(folder):
    files = Checkpoints(folder, {}, 0, bound=None)
    return sorted(step for step in steps_in(folder) if files._is_complete(step))


def counted(done):
    """How often each sample is in the servers' model."""
    return set(done.solution.tolist())


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    mostly_soak([(s, *crews) for s in STRATEGIES for crews in ((2, 3), (4, 2), (3, 1))], few=5),
    ids=repr,
)
def test_with_other_workers_every_batch_is_in_the_model_once_an_epoch(strategy, before, after, tmp_path):
    assert counted(run(tmp_path / "one", strategy, before)) == {2.0}
    steps = whole(tmp_path / "one")
    for step in (steps[1], steps[len(steps) // 2], steps[-1]):
        again = run(only(tmp_path / "one", step, tmp_path / str(step)), strategy, after)
        assert counted(again) == {2.0}
        assert again.server.merged == 2 * 40


@pytest.mark.parametrize("strategy", [ASGD(), STRATEGIES[3]], ids=repr)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_with_other_shards_every_batch_is_in_the_model_once_an_epoch(strategy, before, after, tmp_path):
    run(tmp_path / "one", strategy, 3, shards=before)
    tried = 0
    for step in whole(tmp_path / "one")[::4]:
        copy = only(tmp_path / "one", step, tmp_path / str(step))
        if before > 1 and not agree(copy, step, before):
            with pytest.raises(CheckpointError, match=f"same updates at step {step}"):
                run(copy, strategy, 3, shards=after)
        else:
            tried += 1
            assert counted(run(copy, strategy, 3, shards=after)) == {2.0}
    assert tried


def agree(folder, step, shards):
    """Whether the shards of three workers have got the same pushes."""
    files = Checkpoints(folder, {}, 0, bound=None)
    crew = files.crew_at(step, NodeIdentity(0, 3, 1, shards))
    heard = [files.crew_at(step, server) for server in crew.server_nodes]
    return all(one.pushed == heard[0].pushed for one in heard)


@pytest.mark.parametrize("seed", mostly_soak(range(200), few=2))
def test_deaths_after_a_change_lose_nothing(seed, tmp_path):
    """A worker that dies leaves its batches to others: also those that it had not pushed yet."""
    dice = random.Random(seed)
    strategy, before = dice.choice(STRATEGIES), dice.randint(2, 4)
    after = dice.choice([n for n in (2, 3, 4) if n != before])
    run(tmp_path / "one", strategy, before)
    step = dice.choice(whole(tmp_path / "one")[:-1])
    faults = Faults(noticed_after=0.1).kill(dice.randrange(1, after), dice.uniform(0, 6))
    again = run(only(tmp_path / "one", step, tmp_path / "two"), strategy, after, faults=faults)
    if not isinstance(strategy, Hogwild):  # whose additions may be in before the server knows
        assert counted(again) == {2.0}


def test_what_a_worker_had_not_pushed_before_and_dies_with_comes_again(tmp_path):
    """It pushes after 3 steps, is saved before step 5 with two gradients in hand, and dies in that step."""
    strategy, compute = STRATEGIES[3], Compute(mean=1.0)
    run(tmp_path / "one", strategy, 2, compute=compute)
    faults = Faults(noticed_after=0.1).kill(1, 0.5)
    again = run(only(tmp_path / "one", 5, tmp_path / "two"), strategy, 3, faults=faults, compute=compute)
    assert counted(again) == {2.0}


@pytest.mark.parametrize("strategy", mostly_soak([STRATEGIES[3], STRATEGIES[5]], few=1), ids=repr)
def test_a_run_that_was_changed_goes_on_again_as_it_is(strategy, tmp_path):
    run(tmp_path / "one", strategy, 3)
    run(only(tmp_path / "one", 3, tmp_path / "two"), strategy, 2)
    for step in whole(tmp_path / "two")[1::4]:
        assert counted(run(only(tmp_path / "two", step, tmp_path / str(step)), strategy, 2)) == {2.0}


def test_what_servers_keep_is_cut_as_the_model_is(tmp_path):
    momentum = Downpour(optimizer="momentum", rate=1.0, warmup=0, fixed_shares=False)
    done = run(tmp_path, momentum, 2, compute=Compute(mean=1.0))
    memory = done.server.variables.state()["memory"]
    again = run(tmp_path, momentum, 2, shards=2, compute=Compute(mean=1.0))
    cut = [shard.variables.state()["memory"] for shard in again.nodes[2:]]
    assert [len(part) for part in cut] == [20, 20]
    assert torch.equal(torch.cat(cut), memory)
    assert [shard.version for shard in again.nodes[2:]] == [done.server.version] * 2


def killed(*kills, back_after=float("inf")):
    faults = Faults(noticed_after=0.1, restart_after=back_after)
    for rank, moment in kills:
        faults = faults.kill(rank, moment)
    return faults


@pytest.mark.parametrize("strategy", [ASGD(), STRATEGIES[3], STRATEGIES[5]], ids=repr)
@pytest.mark.parametrize("back_after", [1.0, float("inf")], ids=["back", "away"])
@pytest.mark.parametrize("now", [3, 2])
def test_after_a_death_steps_count_and_every_batch_is_in_the_model_once(strategy, back_after, now, tmp_path):
    """Worker 1 dies in its fifth step of thirteen; the steps after it are whole, up to the end."""
    died = killed((1, 4.5), back_after=back_after)
    assert counted(run(tmp_path / "one", strategy, 3, faults=died)) == {2.0}
    steps = whole(tmp_path / "one")
    assert {6, 8, 10} <= set(steps)
    for step in (*steps[3:-1:4], steps[-1]):
        again = run(only(tmp_path / "one", step, tmp_path / str(step)), strategy, now)
        assert counted(again) == {2.0}
        assert again.server.merged == 2 * 40


def test_after_a_death_the_end_is_saved_with_all_batches_in_the_model(tmp_path):
    done = run(tmp_path / "one", ASGD(), 3, faults=killed((1, 4.5)))
    again = run(only(tmp_path / "one", whole(tmp_path / "one")[-1], tmp_path / "two"), ASGD(), 3)
    assert torch.equal(done.solution, again.solution)
    assert again.server.version == done.server.version


def test_one_that_is_back_leaves_alone_what_was_saved_before_its_death(tmp_path):
    """Worker 1 saves step 2 and dies; its successor begins beside worker 0, which has pushed nothing yet."""
    strategy = STRATEGIES[3]
    run(tmp_path / "one", strategy, 2, faults=killed((1, 5.53), back_after=0.3))
    assert 2 in whole(tmp_path / "one")
    assert counted(run(only(tmp_path / "one", 2, tmp_path / "two"), strategy, 2)) == {2.0}


@pytest.mark.parametrize("seed", mostly_soak(range(400), few=3))
def test_whoever_died_and_came_back_every_batch_is_in_the_model_once(seed, tmp_path):
    """Workers die and come back before a checkpoint and after it, all of them, and several times."""
    dice = random.Random(seed)
    strategy, before, after = dice.choice(EXACT), dice.randint(2, 4), dice.randint(2, 4)

    def faults(workers):
        kills = [(dice.randrange(workers), dice.uniform(0, 12)) for _ in range(dice.randint(1, 4))]
        return killed(*kills, back_after=dice.uniform(0.2, 5))

    assert counted(run(tmp_path / "one", strategy, before, faults=faults(before))) == {2.0}
    steps = whole(tmp_path / "one")
    copy = only(tmp_path / "one", dice.choice(steps), tmp_path / "two")
    assert counted(run(copy, strategy, after, faults=faults(after))) == {2.0}
    last = only(copy, dice.choice(whole(copy)), tmp_path / "three")
    assert counted(run(last, strategy, dice.randint(1, 4))) == {2.0}


class Coupled(Problem):
    """The gradient of a slice depends on the other slice."""

    def gradient(self, rank, step, x):
        return (x.flip(0) - rank - step).mul_(0.3)


@pytest.mark.parametrize("strategy", [SyncServer(), SoftSync(collect=2, wait=True)], ids=repr)
def test_shards_that_saved_a_step_with_and_without_a_later_push_go_on_from_the_same_version(
    strategy, tmp_path, monkeypatch
):
    """Shard 0 hears late that worker 1 has saved step 3: worker 0 has given it its next gradient by then."""
    carry = Switch.carry

    def late(self, src, dst, m):
        is_late = (src, dst, m.tag, m.seq) == (1, 2, Checkpointed().tag, 3)
        self.kernel.after(2.0 if is_late else 0.0, lambda: carry(self, src, dst, m))

    def train(folder):
        files = Checkpoints(folder, {}, 0, keep=1000, bound=None)
        between = BetweenSteps(Control(), files, 3, solution=lambda engine: strategy.solution(Node(engine)))
        start = torch.tensor([1.0, 2.0], dtype=torch.float64)
        sim = Simulation(
            strategy,
            lambda rank: Coupled(lr=0.5).replica(rank, start),
            workers=2,
            steps=8,
            shards=2,
            compute=Compute(mean=1.0, slow={1: 3.0}),
            between_steps=between,
        )
        between.resume_all(sim.nodes)
        return sim.run().solution

    straight = train(tmp_path / "straight")
    monkeypatch.setattr(Switch, "carry", late)
    train(tmp_path / "one")
    monkeypatch.setattr(Switch, "carry", carry)
    again = train(only(tmp_path / "one", 3, tmp_path / "two"))
    assert torch.equal(again, straight)
