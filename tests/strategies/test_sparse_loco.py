"""SparseLoCo: worked out on paper, its identities, and what travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.chunks.bits import bytes_of, from_bytes, to_bytes
from shoal.chunks.chunk_selection import ChunkSelection
from shoal.core.errors import Diverged, WireError
from shoal.core.parameter_chunks import ParameterChunks, chunks_of
from shoal.core.vector import Layout
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults
from shoal.strategies import DiLoCo, SparseLoCo
from shoal.strategies.sparse_loco import by_deviation, by_sign_and_size
from shoal.testing.problems import Problem, simulate

PLAIN = {"period": 1, "values": "exact"}


@dataclass(frozen=True)
class Slopes(Problem):
    """A constant gradient for each worker, element by element."""

    gradients: Sequence[Sequence[float]] = ((4.0, 3.0, 0.0, 2.0), (1.0, 3.0, 0.0, -1.0))

    def gradient(self, rank, step, x):
        return torch.tensor(self.gradients[rank % len(self.gradients)], dtype=x.dtype)


@dataclass(frozen=True)
class Rough(Problem):
    """Gradients with no short binary form, another one for each worker, step and element."""

    def gradient(self, rank, step, x):
        return torch.sin(torch.arange(len(x), dtype=x.dtype) * (1.7 + rank) + step) + 0.1 * x


@pytest.mark.parametrize("values", ["2bit", "signmag", "exact"])
@pytest.mark.parametrize("value", [inf, nan])
def test_a_displacement_that_is_not_finite_ends_the_run(value, values):
    problem = Slopes(lr=0.1, gradients=((1.0, 1.0, 1.0, value),))
    with pytest.raises(Diverged, match="the displacement is no longer finite at step 0: element 3 is"):
        simulate(SparseLoCo(period=1, values=values), problem, workers=2, steps=2, start=[0.0] * 4)


class Errors(Instrument):
    """The error that worker 0 keeps after each step, and where it stands."""

    def __init__(self):
        self.errors, self.x = [], []

    def step(self, node):
        if node.rank == 0:
            self.errors.append(node.variables.state()["error"].clone())
            self.x.append(node.x.tolist())


def trained(strategy, problem, workers=2, steps=2, elements=4, **options):
    seen = Errors()
    start = [0.0] * elements
    run = simulate(strategy, problem, workers=workers, steps=steps, start=start, observers=[seen], **options)
    assert all(torch.equal(node.x, run.nodes[0].x) for node in run.nodes)
    return run, seen


# -- by hand -----------------------------------------------------------------------------------------

# One chunk of four elements, of which one travels. What did not travel counts half in the next round.
#   worker 0   e = (4, 3, 0, 2)                            sends element 0: 4,    e = (0, 3, 0, 2)
#   worker 1   e = (1, 3, 0, -1)                           sends element 1: 3,    e = (1, 0, 0, -1)
#   worker 0   e = (0, 3, 0, 2) / 2 + d = (4, 4.5, 0, 3)   sends element 1: 4.5,  e = (4, 0, 0, 3)
#   worker 1   e = (1, 0, 0, -1) / 2 + d = (1.5, 3, 0, -1.5)    sends element 1: 3
HALF = SparseLoCo(density=0.25, decay=0.5, **PLAIN)


def test_two_rounds_by_hand():
    run, seen = trained(HALF, Slopes())
    assert seen.x == [[-4.0, -3.0, 0.0, 0.0], [-4.0, -3 - (4.5 + 3) / 2, 0.0, 0.0]]
    assert [e.tolist() for e in seen.errors] == [[0.0, 3.0, 0.0, 2.0], [4.0, 0.0, 0.0, 3.0]]
    assert run.worker(0).merged == 4


def test_two_rounds_by_hand_as_a_mean_over_all_workers():
    everybody = SparseLoCo(density=0.25, decay=0.5, merge="all", **PLAIN)
    _, seen = trained(everybody, Slopes())
    assert seen.x == [[-2.0, -1.5, 0.0, 0.0], [-2.0, -1.5 - (4.5 + 3) / 2, 0.0, 0.0]]


def test_the_outer_rate_is_applied_once_and_not_to_what_is_kept():
    _, seen = trained(SparseLoCo(density=0.25, decay=0.5, rate=0.5, **PLAIN), Slopes())
    assert seen.x[0] == [-2.0, -1.5, 0.0, 0.0]
    assert seen.errors[0].tolist() == [0.0, 3.0, 0.0, 2.0]


def test_those_who_sent_an_element_are_weighted_by_their_samples():
    _, seen = trained(HALF, Slopes(counts=(1, 3)))
    assert seen.x[1] == [-4.0, -3 - (4.5 + 3 * 3) / 4, 0.0, 0.0]


# -- identities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["2bit", "8bit", "signmag", "exact"])
@pytest.mark.parametrize("decay", [0.95, 1.0])
def test_what_was_sent_is_what_was_done_less_what_is_kept_and_what_has_leaked(values, decay):
    strategy = SparseLoCo(period=1, density=0.25, decay=decay, values=values)
    run, seen = trained(strategy, Slopes(), workers=1, steps=9)
    done = 9 * Slopes().gradient(0, 0, run.worker(0).x)
    leaked = (1 - decay) * sum(seen.errors[:-1])
    torch.testing.assert_close(-run.worker(0).x, done - seen.errors[-1] - leaked, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rate", [1.0, 0.7])
def test_where_all_travels_it_is_diloco_without_momentum(rate):
    sparse = SparseLoCo(period=3, density=1.0, values="exact", rate=rate)
    run, seen = trained(sparse, Rough(lr=0.1), workers=3, steps=8, elements=12)
    diloco = simulate(DiLoCo(3, rate, 0.0), Rough(lr=0.1), workers=3, steps=8, start=[0.0] * 12)
    torch.testing.assert_close(run.worker(0).x, diloco.worker(0).x, rtol=0, atol=1e-12)
    assert not any(e.any() for e in seen.errors)


@pytest.mark.parametrize("values", ["2bit", "signmag"])
def test_among_equal_workers_both_merges_are_one(values):
    paths = [
        trained(SparseLoCo(2, 0.25, values=values, merge=merge), Slopes(gradients=((4.0, 3.0, 1.0, 2.0),)))[
            1
        ].x
        for merge in ("touched", "all")
    ]
    assert paths[0] == paths[1]


# -- values in two bits ------------------------------------------------------------------------------


def test_two_bits_are_exact_for_two_values():
    values = torch.tensor([-2.0, 3.0, 3.0, -2.0, -2.0], dtype=torch.float64)
    codes, table = by_deviation(values, 4)
    torch.testing.assert_close(table[codes], values, rtol=0, atol=1e-15)


def test_a_single_value_is_exact():
    codes, table = by_deviation(torch.tensor([7.0]), 4)
    assert table[codes].tolist() == [7.0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.sampled_from([4, 256]))
def test_bins_keep_the_sum(values, levels):
    v = torch.tensor(values, dtype=torch.float64)
    codes, table = by_deviation(v, levels)
    assert table[codes].sum().item() == pytest.approx(v.sum().item(), abs=1e-9)


def test_a_sign_and_two_sizes_lose_less_than_bins_of_the_large_elements_of_a_gaussian():
    chunks = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0))
    large = chunks.gather(1, chunks.abs().topk(64, dim=1).indices).flatten()
    bins, sizes = (
        float((table[codes] - large).norm() / large.norm())
        for codes, table in (by_deviation(large, 4), by_sign_and_size(large))
    )
    assert bins == pytest.approx(0.11, abs=0.005)
    assert sizes < 0.076


# -- what travels ------------------------------------------------------------------------------------


def test_a_chunk_of_4096_elements_of_which_64_travel_takes_112_bytes_and_a_table():
    strategy = SparseLoCo(density=1 / 64)
    chunk = ChunkSelection((ParameterChunks(0, 64, 64, 64, 64),), (64,))
    error = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    parts = strategy._encode(chunk, error, chunk.largest([error.view(1, -1)]))
    assert [part.nbytes for part in parts] == [64 * 12 // 8, 64 * 2 // 8, 4 * 4]


def test_every_other_worker_is_sent_that_message_once_a_round():
    run, _ = trained(SparseLoCo(2, 0.25), Rough(lr=0.1), workers=3, steps=8, elements=64)
    header, places, codes, table = 104, 16 * 6 // 8, 16 * 2 // 8, 4 * 8
    assert run.worker(0).meter.bytes_sent == 4 * 2 * (header + places + codes + table)


def test_chunks_are_blocks_of_matrices_runs_of_vectors_and_views_of_kernels():
    layout = Layout(("w", "b", "k"), (torch.Size([6, 4]), torch.Size([6]), torch.Size([2, 2, 3])))
    chunks = chunks_of(layout.pieces(0, layout.numel), 3)
    assert [(c.rows, c.columns, c.height, c.width) for c in chunks] == [
        *((6, 4, 3, 2), (1, 6, 1, 3), (2, 6, 2, 3))
    ]
    v = torch.arange(float(layout.numel))
    assert chunks[0].cut(v)[1].tolist() == [2.0, 3.0, 6.0, 7.0, 10.0, 11.0]  # rows 0 to 2, columns 2 and 3
    back = torch.empty_like(v)
    for each in chunks:
        each.put(each.cut(v), back)
    assert torch.equal(back, v)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 16), st.data())
def test_integers_of_any_width_come_back_from_bytes(bits, data):
    numbers = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=40)))
    packed = to_bytes(numbers, bits)
    assert packed.numel() == bytes_of(numbers.numel(), bits)
    assert torch.equal(from_bytes(packed, bits, numbers.numel()), numbers)


def test_a_place_beyond_its_chunk_is_refused():
    selection = ChunkSelection((ParameterChunks(0, 1, 5, 1, 5),), (1,))
    with pytest.raises(WireError, match="beyond the end of its chunk"):
        selection.from_bytes(torch.tensor([7], dtype=torch.uint8))
    with pytest.raises(WireError):
        selection.from_bytes(torch.zeros(2, dtype=torch.uint8))


# -- in a crew ---------------------------------------------------------------------------------------


def test_the_others_go_on_without_a_dead_worker():
    # worker 1 dies in the second round: the others merge theirs without it, worked out as above
    faults = Faults(noticed_after=0.1).kill(rank=1, moment=1.5)
    start = [0.0] * 4
    run = simulate(
        HALF, Slopes(), workers=2, steps=2, start=start, compute=Compute(1.0), faults=faults, elastic=True
    )
    assert run.worker(0).x.tolist() == [-4.0, -3 - 4.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"density": 0.0}, "density=0.0 should be above 0"),
        ({"decay": 1.5}, "decay=1.5 must be at most 1"),
        ({"values": "3bit"}, "values='3bit' must be one of"),
        ({"merge": "some"}, "merge='some' must be one of"),
        ({"chunk": 0}, "chunk=0"),
        ({"rate": 0.0}, "rate"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        SparseLoCo(**options)
