"""Workers and keepers that die and come back, in virtual time: every sample is in the model once an epoch."""

import pytest
import torch
from comings import Schedule, verdict
from late_mutants import LATE_MUTANTS
from membership_mutants import MUTANTS, OPEN_PLACES
from tally import at_the_end, tally

from marks import GatheredTally, LateTally, Tally
from sampling import mostly_soak
from shoal.sim import Compute, Faults, Network
from shoal.strategies import BMUF, EASGD, DiLoCo, Local, SlowMo, StreamingDiLoCo, Sync
from shoal.testing.problems import Slope, simulate

SEEDS, CHUNK = 10_000, 100
MOST = 600  # seeds for each mutant; it is done with the first that catches it


def at(moment, rank=1, **options):
    return Faults(noticed_after=0.1, **options).kill(rank, moment)


@pytest.mark.parametrize("period", [1, 3])
def test_what_a_dead_worker_left_undone_is_done_by_the_others(period):
    run = tally(at(2.5), period=period)
    assert [w.rank for w in at_the_end(run)] == [0, 2, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))


@pytest.mark.parametrize("period", [1, 3])
def test_one_that_comes_back_takes_part_and_has_the_same_model(period):
    run = tally(at(2.5, restart_after=1.0), period=period)
    assert [w.rank for w in at_the_end(run)] == [0, 1, 2, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    assert run.worker(1).samples > 0


@pytest.mark.parametrize("period", [1, 3])
def test_what_workers_gather_is_theirs_who_are_there_whoever_dies_and_comes_back(period):
    run = tally(at(2.5, restart_after=1.0), strategy=GatheredTally(period))
    assert [w.rank for w in at_the_end(run)] == [0, 1, 2, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))


def test_one_that_comes_back_has_the_centre_of_synchronous_easgd():
    run = tally(at(2.5, restart_after=1.0), strategy=EASGD(period=2, synchronous=True))
    first, *others = (w.x for w in at_the_end(run))
    assert len(others) == 3
    assert all(torch.equal(x, first) for x in others)


@pytest.mark.parametrize("kind", [Local, BMUF, SlowMo, DiLoCo])
def test_one_that_comes_back_has_the_model_of_strategies_whose_means_are_a_block_late(kind):
    run = tally(at(4.5, restart_after=1.0), strategy=kind(period=2, overlap=1))
    first, *others = (w.x for w in at_the_end(run))
    assert len(others) == 3 and first.min() > 0
    assert all(torch.equal(x, first) for x in others)
    assert run.worker(1).incarnation == 1 and run.worker(1).samples > 0


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("faults", [at(9.5, 0, restart_after=2.0), Faults().join(3, 9.5)])
def test_one_that_comes_to_streaming_diloco_has_the_global_model(faults, mixing):
    strategy = StreamingDiLoCo(period=8, fragments=2, overlap=1, mixing=mixing, rate=1.0, momentum=0.0)
    run = tally(faults, strategy=strategy, begins_with=3 if faults.joins else 4, samples=400)
    first, *others = (w.x for w in at_the_end(run))
    assert len(others) == 3 and first.any()
    assert all(torch.equal(x, first) for x in others)


def test_one_that_joins_streaming_diloco_begins_at_the_global_model_by_hand():
    """Worker 0 goes up by 1 a step, in all elements together; worker 1 joins after step 5."""
    theta = 4.0  # handed over after step 4
    x = (theta + 5) / 2  # worker 0's after step 5, half its own
    own, other = x + 3 - theta, 3.0  # moved up to step 8, of 4 samples and of 3
    theta += (4 * own + 3 * other) / 7
    strategy = StreamingDiLoCo(period=4, fragments=1, overlap=1, mixing=0.5, rate=1.0, momentum=0.0)
    options = {"workers": 2, "begins_with": 1, "samples": 5 + 2 * 3, "batch": 1, "epochs": 1}
    run = tally(Faults().join(1, 2.5), strategy=strategy, compute=Compute(mean=1.0), **options)
    assert [w.x.sum().item() for w in at_the_end(run)] == [pytest.approx(theta)] * 2


def test_training_goes_on_while_there_is_no_keeper_and_its_successor_knows_who_is_there():
    run = tally(at(2.5, restart_after=1.0).kill(4, 0.5).kill(4, 4.0))
    assert run.keeper.identity.incarnation == 2
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    assert len(at_the_end(run)) == 4


def test_survivors_lose_no_step():
    """Gradients are 1 and take a second; worker 2 dies in the second block of two steps, at 2.5 s."""
    run = simulate(
        Local(period=2),
        Slope(),
        workers=3,
        steps=6,
        compute=Compute(mean=1.0),
        faults=at(2.5, 2),
        elastic=True,
    )
    assert [run.worker(k).x.item() for k in (0, 1)] == [-6.0, -6.0]


def test_block_momentum_follows_the_number_of_workers():
    """By hand: blocks of 1 step, every update is -1. eta is 1 - 1/2 with two workers, 0 with one.

    Round 1: delta = -1, W = -1, next start -1 - 0.5 = -1.5 (look-ahead). Worker 1 dies in the second block.
    Round 2 has one contributor: delta = 0 * -1 - 1 = -1, W = -1.5 - 1 + 0 * -1 = -2.5. Round 3: -3.5.
    """
    run = simulate(
        BMUF(period=1, warmup=0),
        Slope(),
        workers=2,
        steps=3,
        compute=Compute(mean=1.0),
        faults=at(1.5),
        elastic=True,
    )
    assert run.worker(0).x.item() == -3.5


def test_without_faults_the_run_is_the_one_without_a_keeper():
    plain, elastic = (
        simulate(Sync(), Slope(gradients=(1.0, 3.0)), workers=2, steps=5, elastic=elastic)
        for elastic in (False, True)
    )
    assert torch.equal(plain.worker(0).x, elastic.worker(0).x)
    assert plain.worker(0).meter.bytes_sent == elastic.worker(0).meter.bytes_sent


def test_the_last_worker_goes_on_alone_and_takes_the_others_back():
    faults = Faults(noticed_after=0.1, restart_after=4.0).kill(0, 1.5).kill(1, 1.6).kill(3, 1.7)
    run = tally(faults, samples=80)
    assert len(at_the_end(run)) == 4
    assert all(w.x.eq(2).all() for w in at_the_end(run))


def test_too_few_wait_until_one_that_was_killed_is_back():
    run = tally(at(2.5, restart_after=50.0), min_workers=4)
    assert [w.rank for w in at_the_end(run)] == [0, 1, 2, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    assert run.worker(1).samples > 0
    assert run.seconds > 52.5


@pytest.mark.parametrize("rank", [0, 2])
def test_too_few_wait_no_longer_than_until_one_that_was_cut_off_is_back(rank):
    faults = Faults(noticed_after=0.1, patience=0.5).partition([rank], 2.5, 3.0)
    run = tally(faults, min_workers=4)
    assert [w.rank for w in at_the_end(run)] == [0, 1, 2, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))


@pytest.mark.parametrize("period", [1, 3])
def test_one_that_joins_beyond_the_first_workers_takes_part(period):
    run = tally(Faults().join(3, 2.5).join(2, 4.2), begins_with=2, period=period)
    assert [w.rank for w in at_the_end(run)] == [0, 1, 2, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    assert all(w.samples > 0 for w in at_the_end(run))
    assert all(w.membership.size == 4 for w in at_the_end(run))  # which block momentum follows


def test_one_that_has_just_got_its_state_goes_on_alone_though_the_keeper_calls_it_a_joiner():
    """Worker 1 has its state at 3.1 s. The keeper begins an epoch for worker 2 before it hears of that."""
    faults = Faults(noticed_after=0.05).join(1, 1.2).join(2, 2.95).kill(0, 3.5)
    options = {"workers": 3, "begins_with": 1, "samples": 40, "batch": 1, "network": Network(latency=0.1)}
    run = tally(faults, compute=Compute(mean=1.0), **options)
    assert [w.rank for w in at_the_end(run)] == [1, 2]
    assert all(w.x.eq(2).all() for w in at_the_end(run))


def test_one_that_has_got_its_state_from_a_joiner_goes_on_alone():
    """Worker 1 has its state when 0 dies, the only member; it gives it to the next 0, and dies."""
    faults = Faults(noticed_after=0.45, restart_after=0.02).kill(1, 2.5).kill(0, 3.22).kill(1, 4.34)
    run = tally(faults, workers=2, network=Network(latency=0.2), compute=Compute(mean=1.0))
    assert [w.rank for w in at_the_end(run)] == [0, 1]
    assert all(w.x.eq(2).all() for w in at_the_end(run))


@pytest.mark.parametrize("period", [1, 3])
def test_one_that_says_goodbye_leaves_its_undone_batches_to_the_others(period):
    run = tally(Faults().join(2, 1.5).leave(2, 4.5), workers=3, begins_with=2, period=period)
    assert [w.rank for w in at_the_end(run)] == [0, 1]
    assert run.worker(2).samples > 0
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    assert not any(w.meter.faults for w in at_the_end(run))  # nobody was lost


def test_a_place_that_nobody_takes_is_not_waited_for():
    run = tally(workers=5, begins_with=2)
    assert [w.rank for w in at_the_end(run)] == [0, 1]
    assert all(w.x.eq(2).all() for w in at_the_end(run))


@pytest.mark.parametrize(
    ("faults", "begins_with"), [(Faults().join(1, 1.0), 2), (Faults().join(3, 1.0).join(3, 2.0), 2)]
)
def test_a_place_is_taken_once_and_not_from_those_who_begin(faults, begins_with):
    with pytest.raises(ValueError, match="are open, one worker each"):
        tally(faults, begins_with=begins_with)


@pytest.mark.parametrize("period", [1, 3])
def test_means_that_are_a_block_late_have_every_sample_whoever_dies_joins_and_leaves(period):
    faults = Faults(noticed_after=0.1, restart_after=1.0).kill(1, 5.5).join(3, 2.5).leave(2, 9.5)
    run = tally(faults, strategy=LateTally(period), begins_with=3, samples=120)
    assert [w.rank for w in at_the_end(run)] == [0, 1, 3]
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    assert all(run.worker(rank).samples > 0 for rank in range(4))


def weather(seeds, kind=Tally):
    drawn = map(Schedule.draw, seeds)
    problems = [
        f"comings.py {each.seed}  # {wrong[:300]}" for each in drawn if (wrong := verdict(each, kind))
    ]
    if problems:
        pytest.fail("\n".join(problems[:10]), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_soak(range(0, SEEDS, CHUNK), few=10))
def test_every_sample_is_in_the_model_once_an_epoch_whoever_comes_and_goes(first):
    weather(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_soak(range(0, SEEDS, CHUNK), few=2))
def test_so_it_is_where_means_are_taken_a_block_late(first):
    weather(range(first, first + CHUNK), LateTally)


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE_MUTANTS)
def test_a_mutant_of_late_means_is_caught(name, monkeypatch):
    apply, first = LATE_MUTANTS[name]
    apply(monkeypatch)
    assert any(verdict(Schedule.draw(seed), LateTally) for seed in (first, *range(MOST)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, monkeypatch):
    apply, first = MUTANTS[name]
    apply(monkeypatch)
    assert any(verdict(Schedule.draw(seed)) for seed in (first, *range(MOST)))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak([*OPEN_PLACES], few=1))
def test_a_mutant_of_open_places_needs_open_places(name, monkeypatch):
    MUTANTS[name][0](monkeypatch)
    full = [s for s in map(Schedule.draw, range(40)) if s.begins_with == s.workers]
    assert len(full) > 10
    assert not any(map(verdict, full))
