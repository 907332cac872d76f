"""Decoupled DiLoCo: worked out on paper, and its identities."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import pytest
import torch
from blockwise import Bowls
from central import Census, Trail
from ending import simulate_loops

import shoal
from shoal.core.vector import Layout
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.sim.disk import Disk
from shoal.strategies import DecoupledDiLoCo, DiLoCo, StreamingDiLoCo
from shoal.testing import blobs
from shoal.testing.problems import Problem, Slope, simulate
from shoal.vocabulary.node import Node
from shoal.vocabulary.radial_mean import RadialMean, TensorPlace, tensors_of
from shoal.vocabulary.strategy import Setting

HALVES = {"rate": 0.5, "momentum": 0.5}
WHOLE = {"fragments": 1, "overlap": 0, "mixing": 0.0}  # as in DiLoCo


@dataclass(frozen=True)
class Pulls(Problem):
    """A constant gradient for each worker, in every direction."""

    gradients: Sequence[Sequence[float]] = ()

    def gradient(self, rank, step, x):
        return torch.tensor(self.gradients[rank], dtype=x.dtype)


def trail(strategy, problem, **options):
    """The syncer's model after each round, and the run."""
    seen = Trail()
    run = simulate(strategy, problem, observers=[seen], **{"workers": 2, "compute": Compute(1.0), **options})
    assert all(torch.equal(run.worker(k).x, run.server.x) for k in run.finished if k < run.workers)
    return seen.x, run


# -- by hand ---------------------------------------------------------------------------------------


def test_two_rounds_by_hand():
    # |d| = 2 for both, at right angles: D = 2 (1, 1)/√2 = (√2, √2), where the mean would be (1, 1).
    #   v = D,       Theta = -1/2 (D + 1/2 D)     = -0.75 D
    #   v = 3/2 D,   Theta = Theta - 1/2 (1 + 3/4) D = -1.625 D
    strategy = DecoupledDiLoCo(period=1, quorum=2, **WHOLE, **HALVES)
    seen, run = trail(strategy, Pulls(gradients=((2.0, 0.0), (0.0, 2.0))), steps=2, start=[0.0, 0.0])
    assert seen[0] == pytest.approx([-0.75 * sqrt(2)] * 2)
    assert seen[1] == pytest.approx([-1.625 * sqrt(2)] * 2)
    assert run.server.merged == 4


# Worker 0 takes a step a second; its round begins at 3 s, and at 4 s it wants to know what came of it.
# Worker 1 is called, and comes at the end of its first step, after 3.5 s or after 4.75.
UNEVEN = DecoupledDiLoCo(period=3, fragments=1, overlap=1, grace=1.0, rate=0.5, momentum=0.0, merge="mean")


def test_a_slower_learner_is_called_and_counts_by_what_it_has_done():
    # d = 3 of 3 samples in 3 steps, d = 5 of 1 in 1: weights 3 and 1, D = (3 * 3 + 5)/4 = 3.5
    seen, _ = trail(UNEVEN, Slope(gradients=(1.0, 5.0)), steps=4, compute=Compute(1.0, slow={1: 3.5}))
    assert seen[0] == -0.5 * 3.5


def test_samples_count_twice_where_a_step_has_more_of_them():
    # 2 samples a step: d = 5, weight 2 * 2 / 1 = 4, beside 3 of d = 3: D = (9 + 20)/7
    problem = Slope(gradients=(1.0, 5.0), counts=(1, 2))
    seen, _ = trail(UNEVEN, problem, steps=4, compute=Compute(1.0, slow={1: 3.5}))
    assert seen[0] == pytest.approx(-0.5 * 29 / 7)


class Positions(Instrument):
    """Where each worker stands after each step."""

    def __init__(self):
        self.x = {}

    def step(self, node):
        self.x.setdefault(node.rank, []).append(node.x.item())


def test_what_comes_after_the_end_of_a_round_is_dropped():
    # Worker 1 comes at 4.75 s, and the round has ended at 4 s: Theta = -1/2 * 3. Worker 0, at -4, goes to the
    # middle of both, -2.75, and hands over d = -1.5 + 4.75 = 3.25 at 6 s. This round ends at 7 s, and makes
    # Theta = -1.5 - 1/2 * 3.25 = -3.125. At 9.5 s worker 1 is at -10 and takes in what came of both.
    seen, positions = Trail(), Positions()
    compute, problem = Compute(1.0, slow={1: 4.75}), Slope(gradients=(1.0, 5.0))
    simulate(UNEVEN, problem, workers=2, steps=12, compute=compute, observers=[seen, positions])
    assert seen.x[:2] == [-1.5, -3.125]
    assert positions.x[0][:4] == [-1.0, -2.0, -3.0, -2.75]
    assert positions.x[1][:2] == [-5.0, (-3.125 - 10) / 2]


def test_with_a_larger_quorum_the_round_waits_for_it():
    strategy = DecoupledDiLoCo(
        period=3, fragments=1, overlap=1, quorum=2, rate=0.5, momentum=0.0, merge="mean"
    )
    seen, _ = trail(strategy, Slope(gradients=(1.0, 5.0)), steps=3, compute=Compute(1.0, slow={1: 5.0}))
    assert seen == [-0.5 * (3 + 15) / 2]


# -- the mean --------------------------------------------------------------------------------------


def radial(*displacements, weights=None, tensors=None):
    """The radial-directional average of these."""
    rows = torch.tensor(displacements, dtype=torch.float64)
    whole = [TensorPlace(slice(0, rows.shape[1]), is_radial=True)]
    server = simulate(UNEVEN, Slope(), start=[0.0] * rows.shape[1]).server
    server.variables.load({})
    mean = RadialMean(Node(server), most=2)
    for row, weight in zip(rows, weights or [1.0] * len(rows), strict=True):
        mean.add(row, weight, tensors or whole)
    return mean.take(tensors or whole, torch.empty_like(rows[0]))


def test_one_displacement_is_its_own_average():
    assert torch.allclose(radial([3.0, -4.0], weights=[7.0]), torch.tensor([3.0, -4.0]).double())


def test_equal_displacements_have_their_mean():
    assert torch.allclose(
        radial([3.0, -4.0], [3.0, -4.0], weights=[1.0, 5.0]), torch.tensor([3.0, -4.0]).double()
    )


def test_displacements_at_right_angles_keep_their_length():
    assert radial([2.0, 0.0], [0.0, 2.0]).norm() == pytest.approx(2.0)  # that of their mean is 1.41


def test_displacements_in_random_directions_keep_their_mean_length():
    draws = torch.randn(8, 400, generator=torch.Generator().manual_seed(0))
    rows = (draws / draws.norm(dim=1, keepdim=True) * torch.arange(1, 9)[:, None]).tolist()
    assert radial(*rows).norm() == pytest.approx(4.5)
    assert torch.tensor(rows).mean(dim=0).norm() < 2.0


def test_weights_turn_and_lengthen_the_average():
    # lengths 1 and 4, weights 3 and 1: mean length 7/4; mean direction (3, 1)/√10
    expected = 7 / 4 * torch.tensor([3.0, 1.0], dtype=torch.float64) / sqrt(10)
    assert torch.allclose(radial([1.0, 0.0], [0.0, 4.0], weights=[3.0, 1.0]), expected)


def test_one_that_did_not_move_shortens_the_average_and_does_not_turn_it():
    assert torch.allclose(radial([0.0, 0.0], [0.0, 2.0]), torch.tensor([0.0, 1.0]).double())


def test_those_that_cancel_out_have_their_plain_mean():
    assert torch.allclose(radial([2.0, 0.0], [-1.0, 0.0]), torch.tensor([0.5, 0.0]).double())


def test_every_tensor_is_averaged_by_itself_and_an_embedding_plainly():
    tensors = [TensorPlace(slice(0, 2), is_radial=True), TensorPlace(slice(2, 4), is_radial=False)]
    mean = radial([2.0, 0.0, 2.0, 0.0], [0.0, 2.0, 0.0, 2.0], tensors=tensors)
    assert mean.tolist() == pytest.approx([sqrt(2), sqrt(2), 1.0, 1.0])


def test_a_fragment_s_tensors_are_found_by_name():
    shapes = {"wte.weight": (2, 2), "a.weight": (2, 1), "a.bias": (1,), "b.weight": (3,)}
    layout = Layout(tuple(shapes), tuple(map(torch.Size, shapes.values())))
    pieces = layout.pieces(0, 10)
    assert tensors_of([slice(0, 4), slice(7, 10)], pieces, radial=True) == [
        TensorPlace(slice(0, 4), is_radial=False),
        TensorPlace(slice(4, 7), is_radial=True),
    ]
    assert [each.place for each in tensors_of([slice(4, 7)], pieces, True)] == [slice(0, 2), slice(2, 3)]
    assert not any(each.is_radial for each in tensors_of([slice(4, 7)], pieces, radial=False))


# -- other methods ---------------------------------------------------------------------------------

WORLDS = [
    {},
    {"network": Network(latency=0.01)},
    {"compute": Compute(1.0, slow={1: 1.7})},  # whoever is faster waits
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing"), [(1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.5), (4, 0, 1.0)]
)
def test_with_all_learners_and_plain_means_it_is_streaming_diloco(fragments, overlap, mixing, world):
    options = {"period": 4, "fragments": fragments, "overlap": overlap, "mixing": mixing, **HALVES}
    run = {"steps": 15, "start": [8.0, -3.0, 1.0, 5.0]}
    _, ours = trail(DecoupledDiLoCo(quorum=2, merge="mean", **options), Bowls(lr=0.25), **run, **world)
    theirs = simulate(StreamingDiLoCo(**options), Bowls(lr=0.25), workers=2, **run)
    assert torch.allclose(ours.server.x, theirs.worker(0).x, rtol=0, atol=1e-12)
    assert ours.server.merged == 30


def test_with_one_fragment_and_no_overlap_it_is_diloco():
    ours = simulate(
        DecoupledDiLoCo(period=4, quorum=2, merge="mean", **WHOLE, **HALVES),
        Bowls(lr=0.25),
        workers=2,
        steps=14,
        start=[8.0],
    )
    theirs = simulate(DiLoCo(period=4, **HALVES), Bowls(lr=0.25), workers=2, steps=14, start=[8.0])
    assert torch.allclose(ours.server.x, theirs.worker(0).x, rtol=0, atol=1e-12)


def test_for_one_learner_the_two_means_are_the_same():
    runs = [
        simulate(
            DecoupledDiLoCo(period=4, fragments=2, overlap=1, merge=merge),
            Bowls(lr=0.25),
            steps=13,
            start=[8, 1],
        ).server.x
        for merge in ("radial", "mean")
    ]
    assert torch.allclose(*runs, rtol=0, atol=1e-12)


def test_for_two_learners_they_are_not():
    runs = [
        simulate(
            DecoupledDiLoCo(period=1, quorum=2, merge=merge, **WHOLE),
            Pulls(gradients=((2.0, 0.0), (0.0, 2.0))),
            workers=2,
            start=[0.0, 0.0],
        ).server.x
        for merge in ("radial", "mean")
    ]
    assert runs[0].norm() / runs[1].norm() == pytest.approx(sqrt(2))


# -- what travels ----------------------------------------------------------------------------------


class Lengths(Instrument):
    """How long the vectors are that travel up and down during training, by tag."""

    def __init__(self):
        self.of = {"push": [], "reply": []}

    def send(self, node, dst, m):
        if m.tag in self.of:
            self.of[m.tag].append(m.body.numel())


def test_a_round_sends_one_fragment_up_and_down():
    lengths = Lengths()
    strategy = DecoupledDiLoCo(period=4, fragments=4, overlap=0)
    simulate(strategy, Slope(), workers=1, steps=4, start=[0.0] * 8, observers=[lengths])
    assert (
        lengths.of["push"] == [2] * 4 + [2] * 3
    )  # a turn of each, and what was done since, but for the last
    assert lengths.of["reply"] == [8] + [2] * 7 + [8]  # the whole model first and last


# -- deaths ----------------------------------------------------------------------------------------

COUNTS = {"rate": 1.0, "momentum": 0.0, "merge": "mean"}


@pytest.mark.parametrize("quorum", [1, 2, 3])
@pytest.mark.parametrize("moment", [0.5, 2.5, 4.25, 7.5])
def test_the_others_go_on_without_a_learner_that_died(quorum, moment):
    strategy = DecoupledDiLoCo(period=4, fragments=2, overlap=1, quorum=quorum, **COUNTS)
    faults = Faults(noticed_after=0.1).kill(rank=1, moment=moment)
    run = simulate(
        strategy, Slope(), workers=3, steps=8, start=[0.0, 0.0], compute=Compute(1.0), faults=faults
    )
    assert {0, 2} <= set(run.finished)
    assert run.server.x.max() < -6  # as far as the workers that are left


def test_a_quorum_of_all_is_one_of_all_that_are_left():
    strategy = DecoupledDiLoCo(period=2, quorum=2, **WHOLE, rate=1.0, momentum=0.0)
    faults = Faults(noticed_after=0.1).crash(rank=1, step=1)
    run = simulate(strategy, Slope(), workers=2, steps=4, compute=Compute(1.0), faults=faults)
    assert run.finished == [0, 2]
    assert run.server.merged == 8  # worker 0 did what the other left


@pytest.mark.parametrize("moment", [1.3, 4.1, 6.6])
def test_one_that_comes_back_takes_the_whole_model_and_goes_on(moment):
    strategy = DecoupledDiLoCo(period=3, fragments=1, overlap=1, quorum=3, **COUNTS)
    run = simulate(
        strategy,
        Census(steps=8),
        workers=3,
        steps=8,
        start=[0.0] * 24,
        compute=Compute(1.0, jitter=0.3),
        network=Network(latency=0.0625),
        faults=Faults(noticed_after=0.25, restart_after=0.75).kill(rank=1, moment=moment),
    )
    assert run.worker(1).identity.incarnation == 1
    assert run.server.x.min() > 0  # every batch is in the model


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("quorum", [1, 2])
def test_a_syncer_that_dies_goes_on_where_it_was_or_from_a_snapshot(keeps, quorum):
    strategy = DecoupledDiLoCo(period=4, fragments=2, overlap=1, quorum=quorum)
    options = {
        "workers": 2,
        "steps": 24,
        "compute": Compute(1.0, jitter=0.2),
        "network": Network(latency=0.03),
    }
    faults = Faults(noticed_after=0.1, restart_after=0.5).kill(rank=2, moment=11.0)
    disk = {"disk": lambda rank: Disk(keeps_every_update=keeps, snapshot_every=7)}
    run = simulate(strategy, Bowls(lr=0.25), start=[50.0, 40.0], faults=faults, **disk, **options)
    assert run.server.identity.incarnation == 1
    assert run.finished == [0, 1, 2]
    assert run.server.x.max() < 15
    assert run.server.merged == 48 or not keeps


@pytest.mark.parametrize("quorum", [1, 2])
@pytest.mark.parametrize("lengths", [(7, 7), (4, 9), (9, 1)])
def test_loops_of_different_lengths_end_with_every_sample(quorum, lengths):
    strategy = DecoupledDiLoCo(period=4, fragments=2, overlap=1, quorum=quorum)
    run = simulate_loops(strategy, Bowls(lr=0.25), lengths, start=[8.0, 5.0], compute=Compute(1.0))
    assert all(torch.equal(run.worker(k).x, run.server.x) for k in range(2))
    assert run.server.x.max() < 8
    assert run.server.merged == sum(lengths)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quorum": 0}, "quorum=0"),
        ({"grace": 1.5}, "grace=1.5 must be at most 1"),
        ({"mixing": -0.5}, "mixing"),
        ({"period": 10}, "no multiple of fragments=4"),
        ({"overlap": 25}, "overlap=25 must be below period / fragments = 25"),
        ({"merge": "sum"}, "merge"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DecoupledDiLoCo(**options)


def test_a_quorum_of_more_than_all_is_refused():
    with pytest.raises(ValueError, match="quorum=3: there are 2 workers"):
        DecoupledDiLoCo(quorum=3).check(Setting(workers=2))


def test_several_servers_are_refused():
    with pytest.raises(ValueError, match=r"servers=2: .* take one server"):
        Simulation(DecoupledDiLoCo(), lambda rank: None, workers=2, steps=1, shards=2)


@pytest.mark.slow
def test_it_learns_on_real_processes():
    strategy = DecoupledDiLoCo(period=8, fragments=2, overlap=2)
    result = shoal.run(blobs(), strategy, workers=3, epochs=4)
    assert result.test_accuracy > 75
    assert result.curve[-1]["samples"] == result.samples == 4 * 300
