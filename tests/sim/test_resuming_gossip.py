"""Checkpoints of workers without a server and without averages, one of which has died: no sample is lost.

Each has a model of its own, so that what was trained on is counted at the data, and not in a model.
"""

import random
import shutil
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from tally import TallyReplica

from sampling import mostly_soak
from shoal.core.codec import Codec, Identity, expect
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Gradient
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.replicas.batches import Batches
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.step_folders import step_folder, steps_in
from shoal.strategies import ADPSGD, CHOCO, DPSGD, SGP, Gossip, GossipGraD, NoLoCo, Strom
from shoal.testing.problems import Slope
from shoal.vocabulary.node import Node

SAMPLES, BATCH, EPOCHS = 40, 2, 2
ALL = [Gossip(help=False), ADPSGD(help=False), DPSGD(), SGP(), CHOCO(), GossipGraD(), Strom()]


class Noted(TallyReplica):
    """Writes down which samples were trained on."""

    def __init__(self, rank, workers, trained):
        super().__init__(rank, workers, SAMPLES, BATCH, seed=0)
        self._trained = trained

    async def gradient(self):
        ids, _ = self.batches.next()
        self._trained.update(ids.tolist())
        return Gradient(-torch.bincount(ids, minlength=SAMPLES).double(), len(ids), None)


def saved_in(folder):
    return Checkpoints(folder, {}, 0, keep=1000, bound=None)


def run(folder, strategy, workers, faults=None, every=1, epochs=EPOCHS):
    """A run that resumes if it can, and writes a checkpoint every so many steps; what it has trained on."""
    trained = Counter()
    solution = lambda engine: strategy.solution(Node(engine))  # noqa: E731
    between = BetweenSteps(Control(), saved_in(folder), every, solution=solution)
    simulation = Simulation(
        strategy,
        lambda rank: Noted(rank, workers, trained),
        workers=workers,
        steps=Noted(0, workers, trained).batches.end_of(epochs),
        passes=epochs,
        compute=Compute(mean=1.0, jitter=0.2),
        faults=faults or Faults(),
        between_steps=between,
    )
    between.resume_all(simulation.nodes)
    simulation.run()
    return trained


def whole(folder):
    return sorted(step for step in steps_in(folder) if saved_in(folder)._is_complete(step))


def only(folder, step, copy):
    """That checkpoint alone."""
    shutil.copytree(step_folder(folder, step), step_folder(copy, step))
    return copy


def trained_by(folder, step):
    """The samples that are done before this step, as its checkpoint says: so many batches of each share."""
    crew = saved_in(folder).crew_at(step, NodeIdentity(0, 1))
    deal = saved_in(folder).find(step, crew.identity(crew.members[0]))["crew"]["deal"]
    batches = Batches(torch.arange(SAMPLES), torch.arange(SAMPLES), batch=BATCH, rank=0, workers=1, seed=0)
    batches.take_deal(deal)
    done = [(k, p) for k, place in enumerate(crew.places) for p in range(deal["begin"][0], place)]
    return Counter(sample for k, p in done for sample in batches._indices(k, p).tolist())


def killed(*kills, back_after=float("inf")):
    faults = Faults(noticed_after=0.1, restart_after=back_after)
    for rank, moment in kills:
        faults = faults.kill(rank, moment)
    return faults


def descend(folder, strategy, steps, problem, workers, **options):
    """The run of workers that go down so many steps, and have resumed if they could."""
    between = BetweenSteps(Control(), saved_in(folder), 10)
    start = torch.zeros(1, dtype=torch.float64)
    simulation = Simulation(
        strategy,
        lambda rank: problem.replica(rank, start.clone()),
        workers=workers,
        steps=steps,
        between_steps=between,
        **options,
    )
    between.resume_all(simulation.nodes)
    return simulation.run()


@pytest.mark.parametrize("topology", ["one_peer", "ring"])
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_push_sum_makes_no_longer_steps_for_shares_that_were_under_way(topology, overlap, tmp_path):
    """Resumed four times, with 52 steps in all; what is lost with the shares is at most their lateness."""
    strategy, folder = SGP(topology, overlap), tmp_path / "0"
    options = {"compute": Compute(mean=1.0), "network": Network(latency=overlap + 0.5)}
    for step in (10, 20, 30, 40):
        descend(folder, strategy, 52, Slope(lr=0.125), 4, **options)
        folder = only(folder, step, tmp_path / str(step))
    end = descend(folder, strategy, 52, Slope(lr=0.125), 4, **options).worker(0).x.item()
    assert end == pytest.approx(-52 / 8, abs=4 * overlap / 8 + 1e-9)


@dataclass(frozen=True)
class Halves(Codec):
    """Sends half of each gradient, in whole numbers, and keeps the rest."""

    feedback: str = "residual"  # type: ignore[assignment]

    def encode(self, v, state):
        return ((v / 2).floor().to(torch.int16),), state

    def decode(self, payload, out):
        (halves,) = expect(payload, (torch.int16, out.numel()))
        return out.copy_(halves)


@pytest.mark.parametrize("help", [True, False])
@pytest.mark.parametrize("latency", [0.0, 2.5])
@pytest.mark.parametrize("codec", [Identity(), Halves()], ids=repr)
@pytest.mark.parametrize(("workers", "slow"), [(2, {1: 4.0}), (3, {0: 4.0}), (3, {})], ids=repr)
def test_strom_takes_every_gradient_once_however_often_it_resumes(
    workers, slow, codec, latency, help, tmp_path
):
    """Gradients are 1, 2 and 3, of 80 steps each, at a rate of 1; workers resume at steps 20, 40 and 60."""
    strategy, problem = Strom(help=help), Slope(gradients=(1.0, 2.0, 3.0)[:workers])
    options = {"compute": Compute(1.0, slow=slow), "network": Network(latency=latency), "codec": codec}
    folder = tmp_path / "0"
    for step in (20, 40, 60):
        descend(folder, strategy, 80, problem, workers, **options)
        folder = only(folder, step, tmp_path / str(step))
    run = descend(folder, strategy, 80, problem, workers, **options)
    done = [run.worker(k) for k in range(workers)]
    kept = sum(w.coding.states["news"]["rest"].item() for w in done) if not codec.exact else 0.0
    assert [w.x.item() for w in done] == [kept - 80 * sum(problem.gradients)] * workers


@pytest.mark.parametrize("slow", [{}, {0: 4.0}, {2: 4.0}], ids=repr)
def test_strom_resumes_after_a_return_with_what_there_was_but_for_what_was_under_way_then(slow, tmp_path):
    """Worker 1 dies in its 21st step and is soon back; all save step 60 after that."""
    problem, options = Slope(gradients=(1.0, 2.0, 4.0)), {"compute": Compute(1.0, slow=slow)}
    strategy, faults = Strom(help=False), killed((1, 20.5), back_after=1.5)
    once = descend(tmp_path / "one", strategy, 80, problem, 3, faults=faults, **options).worker(0).x.item()
    again = descend(only(tmp_path / "one", 60, tmp_path / "two"), strategy, 80, problem, 3, **options)
    assert once == pytest.approx(-80 * 7, abs=10)
    assert again.worker(0).x.item() == pytest.approx(once, abs=5)


EACH_SAMPLE = Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@pytest.mark.parametrize("strategy", mostly_soak(ALL, few=3), ids=repr)
@pytest.mark.parametrize("back_after", [1.0, float("inf")], ids=["back", "away"])
def test_after_a_death_steps_count_and_the_rest_of_its_share_is_dealt_to_all(strategy, back_after, tmp_path):
    """Worker 1 dies in its fifth step of thirteen."""
    run(tmp_path / "one", strategy, 3, killed((1, 4.5), back_after=back_after))
    steps = whole(tmp_path / "one")
    assert len([step for step in steps if step >= 6]) >= 4
    for number, step in enumerate(steps[4::3]):
        copy = only(tmp_path / "one", step, tmp_path / str(step))
        done = trained_by(copy, step)
        assert done + run(copy, strategy, (3, 2, 4)[number % 3]) == EACH_SAMPLE


def test_those_who_are_left_when_the_last_has_died_are_no_whole_crew(tmp_path):
    """Worker 3 of 4 dies in its eighth step: the other three go on with the rest of its share."""
    run(tmp_path / "one", DPSGD(), 4, killed((3, 7.8)))
    copy = only(tmp_path / "one", 9, tmp_path / "two")
    done = trained_by(copy, 9)
    assert done + run(copy, DPSGD(), 3) == EACH_SAMPLE


@pytest.mark.parametrize("strategy", [*ALL, NoLoCo(period=2)], ids=repr)
@pytest.mark.parametrize("kills", [((1, 4.5),), ((1, 2.5), (2, 6.5), (1, 9.5))], ids=len)
def test_after_a_return_the_end_is_saved_as_without_deaths(strategy, kills, tmp_path):
    """Who was back ends some rounds after the others, and stands where they do: a third pass may follow."""
    workers = 3
    run(tmp_path, strategy, workers, killed(*kills, back_after=0.5), every=None)
    end = Noted(0, workers, Counter()).batches.end_of(EPOCHS)
    assert whole(tmp_path) == [end]
    assert trained_by(tmp_path, end) == EACH_SAMPLE
    third = run(tmp_path, strategy, workers, epochs=EPOCHS + 1)
    assert third == Counter(range(SAMPLES))


def test_what_a_worker_said_before_it_died_is_not_taken_for_what_its_successor_says(tmp_path):
    """Worker 2 says that it is done, and dies: nobody may end before its successor has said so, too."""
    kills = (0, 6.4), (1, 6.7), (2, 9.97)
    trained = run(tmp_path, DPSGD(), 4, killed(*kills, back_after=3.0))
    assert not EACH_SAMPLE - trained


@pytest.mark.parametrize("seed", mostly_soak(range(200), few=3))
def test_whoever_died_before_every_sample_is_trained_on(seed, tmp_path):
    """In a run that was resumed workers die, too, and come back: the batch they were at may come twice."""
    dice = random.Random(seed)
    strategy, workers = dice.choice(ALL), dice.randint(2, 4)
    kills = [(dice.randrange(workers), dice.uniform(0, 12)) for _ in range(dice.randint(1, 3))]
    run(tmp_path / "one", strategy, workers, killed(*kills, back_after=dice.choice([0.5, 3.0])))
    step = dice.choice(whole(tmp_path / "one") or [0])
    if step:
        copy, again = only(tmp_path / "one", step, tmp_path / "two"), dice.randint(2, 4)
        done = trained_by(copy, step)
        kill = dice.randrange(again), dice.uniform(0, 4)
        trained = done + run(copy, strategy, again, killed(kill, back_after=0.5))
        assert not EACH_SAMPLE - trained
        assert (trained - EACH_SAMPLE).total() <= 2 * BATCH
