"""Checkpoints where workers come and go, and runs that go on with other nodes: every sample once an epoch.

The model counts how often each sample is in it: see `tally`.
"""

import random
import shutil

import pytest
from tally import Tally, at_the_end, tally

from marks import LateTally
from sampling import mostly_soak
from shoal.core.identity import NodeIdentity
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.sim import Faults
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.step_folders import step_folder, steps_in
from shoal.vocabulary.node import Node

ALL = 1000  # checkpoints to keep


def hook(folder, strategy, every=1, keep=ALL):
    saved = Checkpoints(folder, {}, 0, keep=keep, bound=None)
    return BetweenSteps(Control(), saved, every, solution=lambda engine: strategy.solution(Node(engine)))


def saved_run(folder, faults=None, *, strategy=None, period=1, every=1, **options):
    """A run that writes a checkpoint before every step."""
    strategy = strategy or Tally(period)
    between = hook(folder, strategy, every)
    return tally(faults, strategy=strategy, between_steps=between, **options)


def resumed(folder, step, copy, faults=None, *, strategy=None, period=1, **options):
    """A run that goes on from that step, and writes more checkpoints to `copy`."""
    shutil.copytree(step_folder(folder, step), step_folder(copy, step))
    strategy = strategy or Tally(period)
    between = hook(copy, strategy)
    return tally(faults, strategy=strategy, between_steps=between, before=between.resume_all, **options)


def counts(run):
    """How often each sample is in the model, at the workers that got to the end."""
    return {n for w in at_the_end(run) for n in w.x.tolist()}


def whole_steps(folder, members):
    """The steps at which these workers, and no others, took part."""
    wrote = {
        step: {path.stem for path in step_folder(folder, step).glob("*.json")} for step in steps_in(folder)
    }
    return sorted(step for step, names in wrote.items() if names == {f"worker-{k}" for k in members})


def dies(rank, moment, **options):
    return Faults(noticed_after=0.1, **options).kill(rank, moment)


# -- workers that come and go -----------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3])
def test_a_step_counts_without_a_worker_that_was_away_then(period, tmp_path):
    saved_run(tmp_path / "one", dies(1, 2.5), period=period)
    away = whole_steps(tmp_path / "one", [0, 2, 3])
    assert away and away[0] == 3, "from the average on in which it was missing"
    for step in (away[0], away[0] + 1, away[-1]):  # at an average, after one, at the end
        again = resumed(tmp_path / "one", step, tmp_path / str(step), period=period)
        assert counts(again) == {2.0}
        assert len(at_the_end(again)) == 4, "the one that was away takes part again"


@pytest.mark.parametrize("period", [1, 3])
def test_a_worker_that_has_come_back_goes_on_from_its_own_state(period, tmp_path):
    straight = saved_run(tmp_path / "one", dies(1, 2.5, restart_after=1.0), period=period)
    back = [s for s in whole_steps(tmp_path / "one", range(4)) if s > 3]
    assert len(back) > 3
    for step in (back[0], back[1], back[-1]):
        again = resumed(tmp_path / "one", step, tmp_path / str(step), period=period)
        assert counts(again) == {2.0}
        for k in range(4):
            assert again.worker(k).t == straight.worker(k).t
            assert again.worker(k).samples == straight.worker(k).samples


def test_a_damaged_file_of_a_worker_that_took_part_sends_all_back_to_the_step_before(tmp_path):
    saved_run(tmp_path / "one", dies(3, 2.5))
    away = whole_steps(tmp_path / "one", [0, 1, 2])
    steps = away[1], away[2]
    shutil.copytree(step_folder(tmp_path / "one", steps[0]), step_folder(tmp_path / "two", steps[0]))
    (step_folder(tmp_path / "one", steps[1]) / "worker-2.safetensors").write_bytes(b"")
    told = []
    between = hook(tmp_path / "two", Tally())
    shutil.copytree(step_folder(tmp_path / "one", steps[1]), step_folder(tmp_path / "two", steps[1]))

    def begin(nodes):
        between.resume_all(nodes)
        told.extend(node.t for node in nodes)

    again = tally(workers=2, between_steps=between, before=begin)
    assert told == [steps[0]] * 2
    assert counts(again) == {2.0}


# -- other numbers of workers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # 24 samples, batches of 2. Two workers have done 3 steps of 4 samples: 12 are taken.
        (2, 3, [[12, 15], [13, 16], [14, 17]]),
        # Four have done 3 steps of 8 samples, which is the whole epoch.
        (4, 2, [[0, 2], [1, 3]]),
        (2, 2, [[12, 14], [13, 15]]),
        (1, 2, [[6, 8], [7, 9]]),  # 3 steps of 2 samples
    ],
)
def test_the_data_that_is_left_is_dealt_to_the_workers_there_are(before, after, expected, tmp_path):
    settings = {"samples": 24, "batch": 2, "elastic": False}
    saved_run(tmp_path / "one", workers=before, **settings)
    seen = []

    def begin(nodes):
        between.resume_all(nodes)
        epoch = nodes[0].replica.batches._find(3)[0]
        order = nodes[0].replica.batches._data(epoch).tolist()
        for node in nodes:
            own = node.replica.batches
            seen.append([order.index(i) for i in own._indices(own._rank, own.position).tolist()])

    shutil.copytree(step_folder(tmp_path / "one", 3), step_folder(tmp_path / "two", 3))
    between = hook(tmp_path / "two", Tally())
    run = tally(workers=after, between_steps=between, before=begin, **settings)
    assert seen == expected
    assert counts_all(run) == {2.0}


def counts_all(run):
    return {n for k in range(run.workers) for n in run.worker(k).x.tolist()}


def test_what_gone_workers_did_since_the_last_average_is_dealt_again(tmp_path):
    """4 to 2 in mid-block: an average after every 3 steps of 4 samples, saved before step 5.

    Samples 0 to 11 of the order are in the model. Of the 8 samples of steps 3 and 4, workers 2 and 3 had
    14, 15, 18 and 19, which come next; 12, 13, 16 and 17 are in what workers 0 and 1 have done.
    """
    settings = {"samples": 30, "batch": 1, "elastic": False, "period": 3, "epochs": 1}
    saved_run(tmp_path / "one", workers=4, **settings)
    shutil.copytree(step_folder(tmp_path / "one", 5), step_folder(tmp_path / "two", 5))
    between = hook(tmp_path / "two", Tally(3))
    seen = []

    def begin(nodes):
        between.resume_all(nodes)
        own = nodes[0].replica.batches
        order = own._data(0).tolist()
        rest = ([*own._indices(0, step), *own._indices(1, step)] for step in range(5, own.end_of(1)))
        seen.extend([order.index(i) for i in ids] for ids in rest)

    run = tally(workers=2, between_steps=between, before=begin, **settings)
    assert seen == [[14, 18], [15, 19], [20, 21], [22, 23], [24, 25], [26, 27], [28, 29]]
    assert counts_all(run) == {1.0}


def test_one_that_joined_after_the_last_average_is_not_of_the_crew_that_saved_before_it(tmp_path):
    """Workers 0 and 1 save step 24 in mid-block; worker 2 joins after the average, at step 24 as well."""
    settings = {"samples": 25, "batch": 1, "period": 7}
    saved_run(tmp_path / "one", workers=2, **settings)
    away = dies(2, 0.5, restart_after=0.5)
    resumed(tmp_path / "one", 22, tmp_path / "two", away, workers=3, **settings)
    assert whole_steps(tmp_path / "two", range(3)) == [24], "three have saved, of two moments"
    for workers in (2, 3, 4):
        again = resumed(tmp_path / "two", 24, tmp_path / str(workers), workers=workers, **settings)
        assert counts(again) == {2.0}


@pytest.mark.parametrize("seed", mostly_soak(range(200), few=4))
def test_whoever_comes_goes_and_resumes_every_sample_is_in_the_model_once_an_epoch(seed, tmp_path):
    dice = random.Random(seed)
    settings = {
        "samples": dice.randint(20, 60),
        "batch": dice.randint(1, 3),
        "period": dice.choice([1, 2, 3, 7]),
    }
    workers, first, crews = dice.randint(1, 5), tmp_path / "0", []
    elastic = workers > 1 and dice.random() < 0.7

    def storm(workers):
        faults = Faults(noticed_after=0.1, restart_after=dice.choice([0.5, 2.0, 100.0]))
        for _ in range(dice.randint(0, 2) if elastic and workers > 1 else 0):
            faults = faults.kill(dice.randrange(1, workers), dice.uniform(0, 8))
        return faults

    saved_run(first, storm(workers), workers=workers, elastic=elastic, **settings)
    folder, step = first, 0
    for attempt in range(1, 4):
        crews.append(workers)
        later = [s for s in readable(folder) if s > step]
        if not later:
            break
        step, workers, copy = dice.choice(later), dice.randint(1, 5), tmp_path / str(attempt)
        run = resumed(folder, step, copy, storm(workers), workers=workers, elastic=elastic, **settings)
        there = at_the_end(run) if elastic else run.nodes
        assert {n for w in there for n in w.x.tolist()} == {2.0}, (crews, step, workers)
        folder = copy


def by_own(between, begins):
    """A worker from elsewhere writes no checkpoint."""

    async def hook(engine):
        if engine.rank < begins:
            await between(engine)

    return hook


@pytest.mark.parametrize("period", [1, 3])
def test_a_checkpoint_needs_no_state_of_a_worker_from_elsewhere(period, tmp_path):
    """Worker 2 comes from elsewhere after two steps; what it does in a block that is cut comes again."""
    strategy = Tally(period)
    hook_of_all = hook(tmp_path / "one", strategy)
    faults = Faults().join(2, 2.5)
    one = tally(
        faults, strategy=strategy, workers=4, begins_with=2, between_steps=by_own(hook_of_all, 2), samples=60
    )
    assert counts(one) == {2.0}
    files = Checkpoints(tmp_path / "one", {}, 0, bound=None)
    joined = [
        s for s in readable(tmp_path / "one") if files.crew_at(s, NodeIdentity(0, 4)).members == (0, 1, 2)
    ]
    assert len(joined) > 4
    for number, step in enumerate(joined[::3]):
        copy = tmp_path / str(step)
        again = resumed(
            tmp_path / "one", step, copy, period=period, workers=(2, 3, 4)[number % 3], samples=60
        )
        assert counts(again) == {2.0}


def test_a_run_with_open_places_goes_on_with_open_places(tmp_path):
    saved_run(tmp_path / "one", workers=4, begins_with=2)
    again = resumed(tmp_path / "one", 5, tmp_path / "two", Faults().join(3, 2.5), workers=4, begins_with=2)
    assert counts(again) == {2.0}
    assert len(at_the_end(again)) == 3


def readable(folder):
    """The steps at which all who took part have a file."""
    files = Checkpoints(folder, {}, 0, bound=None)
    return [step for step in steps_in(folder) if files._is_complete(step)]


@pytest.mark.parametrize("guests", [False, True])
def test_a_step_nobody_can_resume_does_not_push_out_those_one_can(guests, tmp_path):
    """With late means one is under way at almost every step, for those alone who take part in it."""
    faults = Faults().join(2, 2.5) if guests else dies(3, 4.5)
    begins = {"begins_with": 2} if guests else {}
    strategy = LateTally(2)
    between = hook(tmp_path / "one", strategy, keep=2)
    saves = by_own(between, 2) if guests else between
    tally(faults, strategy=strategy, between_steps=saves, workers=4, samples=60, **begins)
    steps = readable(tmp_path / "one")
    assert steps
    again = resumed(
        tmp_path / "one", max(steps), tmp_path / "two", strategy=LateTally(2), workers=4, samples=60, **begins
    )
    assert counts(again) == {2.0}
