"""The largest elements: who travels, who waits, and that nothing is lost."""

import copy

import pytest
import torch

from sampling import sampled
from shoal.codecs.sparse import gaps, selection
from shoal.codecs.sparse.codec import Sparse
from shoal.codecs.sparse.top_k import TopK
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError
from shoal.strategies import Sync, SyncServer
from shoal.testing.problems import Problem, simulate

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(selection, "on_cpu", lambda *tensors: False)
        monkeypatch.setattr(gaps, "on_cpu", lambda *tensors: False)


def whole(elements, seed, dtype=torch.float32):
    return torch.randint(-50, 51, (elements,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded(codec, payload, like):
    return codec.decode(payload, torch.full_like(like, 7))


# -- on paper --------------------------------------------------------------------------------------


def test_two_of_five_by_hand(lines):
    codec, v = TopK(density=0.4), torch.tensor([1.0, -5.0, 2.0, 4.0, -3.0])
    (header, stream, values), _ = codec.encode(v, {})
    assert HEADER.unpack(bytes(header.tolist()))[2:6] == (9, 0, 5, 2)
    # log2(ln 2 * 2.5) = 0.79, so k = 1; gaps 1 = 0 * 2 + 1 twice: low bits 1 1, then a one twice
    assert stream.tolist() == [0b11, 0b11]
    assert values.tolist() == [-5.0, 4.0]
    assert decoded(codec, (header, stream, values), v).tolist() == [0.0, -5.0, 0.0, 4.0, 0.0]


def test_who_is_not_sent_waits_until_it_has_grown(lines):
    codec, rest = TopK(density=0.25), torch.zeros(4)
    v = torch.tensor([1.0, 2.0, 3.0, 0.5])
    got = []
    for _ in range(5):
        payload, _ = codec.encode_rest(v, rest, {})
        got.append(decoded(codec, payload, v).tolist())
    assert got == [
        [0, 0, 3, 0],  # 1 2 3 .5
        [0, 4, 0, 0],  # 2 4 3 1: waited 2 steps
        [0, 0, 6, 0],  # 3 2 6 1.5
        [4, 0, 0, 0],  # 4 4 3 2: of equal ones the first
        [0, 6, 0, 0],  # 1 6 6 2.5
    ]
    assert rest.tolist() == [1.0, 0.0, 6.0, 2.5]


def test_a_density_is_a_share():
    for density in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"above 0 and at most 1, as 0\.01"):
            TopK(density=density)
    with pytest.raises(ValueError, match="none, residual, double"):
        TopK(feedback="some")


def test_whoever_merges_sends_on_the_union_unless_it_is_to_cut_too():
    assert TopK().merged == TopK(feedback="none").merged == Sparse()
    assert TopK(feedback="double").merged == TopK(feedback="double")


# -- what it promises ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "elements"), sampled(DTYPES, [0, 1, 5, 4096, 5000]))
def test_what_is_sent_and_what_waits_is_all_there_was(elements, dtype, lines):
    # in whole numbers: 5 times up to 50 is below 256, up to which the 8 bits of bfloat16 hold them all
    codec, rest = TopK(density=0.02), torch.zeros(elements, dtype=dtype)
    total, sent = torch.zeros_like(rest), torch.zeros_like(rest)
    for step in range(5):
        v = whole(elements, step, dtype)
        before = v.clone()
        total += v
        payload, _ = codec.encode_rest(v, rest, {})
        sent += decoded(codec, payload, v)
        assert torch.equal(sent + rest, total)
        assert torch.equal(v, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_density_1_it_is_the_vector_itself(dtype, lines):
    codec, v = TopK(density=1.0), torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload, _ = codec.encode(v, {})
    assert torch.equal(decoded(codec, payload, v), v)
    assert [part.numel() for part in payload] == [32, 3000]  # no positions
    v[::7] = 0
    assert torch.equal(decoded(codec, codec.encode(v, {})[0], v), v)


def test_kernel_and_torch_leave_the_same_rest_and_send_the_same_bytes(monkeypatch):
    codec, ours, theirs = TopK(density=0.05), torch.zeros(9001), torch.zeros(9001)
    for step in range(4):
        v = torch.randn(9001, generator=torch.Generator().manual_seed(step))
        fast, _ = codec.encode_rest(v, ours, {})
        with monkeypatch.context() as patch:
            patch.setattr(selection, "on_cpu", lambda *tensors: False)
            patch.setattr(gaps, "on_cpu", lambda *tensors: False)
            slow, _ = codec.encode_rest(v, theirs, {})
        assert all(map(torch.equal, fast, slow)) and torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("density", "elements"), [(0.01, 10_000), (0.1, 10_000), (0.001, 50_000), (0.5, 999)]
)
def test_as_many_bytes_as_the_formula_says(density, elements):
    v = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    payload, _ = TopK(density=density).encode(v, {})
    k = round(density * elements)
    stream = gaps.pack(v.abs().topk(k).indices.sort().values, elements)
    assert sum(part.nbytes for part in payload) == 32 + len(stream) + 4 * k


def test_the_rest_of_what_is_sent_is_zero_even_if_it_is_not_finite(lines):
    codec, rest = TopK(density=0.4), torch.zeros(5)
    payload, _ = codec.encode_rest(torch.tensor([1.0, float("nan"), 2.0, float("inf"), 3.0]), rest, {})
    assert rest.tolist() == [1.0, 0.0, 2.0, 0.0, 3.0]
    got = decoded(codec, payload, rest)
    assert got[1].isnan() and got[3] == float("inf")


def test_a_copied_rest_goes_on_alike():
    codec, rest = TopK(density=0.03), torch.zeros(1000)
    for step in range(3):
        codec.encode_rest(whole(1000, step), rest, {})
    saved = copy.deepcopy(rest)
    first, second = (codec.encode_rest(whole(1000, 9), r, {})[0] for r in (rest, saved))
    assert all(map(torch.equal, first, second)) and torch.equal(rest, saved)


# -- in a run --------------------------------------------------------------------------------------


class Drawn(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return torch.sin(x * (rank + 1) + step) / 3


@pytest.mark.parametrize("strategy", [Sync(), SyncServer()], ids=["sync", "sync_server"])
@pytest.mark.parametrize("feedback", ["none", "residual", "double"])
def test_four_workers_with_density_1_are_dense_sync_bit_for_bit(strategy, feedback):
    problem, start = Drawn(lr=0.1, momentum=0.9, counts=(1, 2, 5)), [0.3, -0.7, 0.1] * 7
    dense = simulate(strategy, problem, workers=4, steps=9, start=start)
    codec = TopK(density=1.0, feedback=feedback)
    sparse = simulate(strategy, problem, workers=4, steps=9, start=start, codec=codec)
    for k in range(4):
        assert torch.equal(sparse.worker(k).x, dense.worker(k).x)


class Bowl(Problem):
    """Every worker has a minimum of its own; the middle of four is 1.5."""

    def gradient(self, rank, step, x):
        return x - rank


@pytest.mark.slow
@pytest.mark.parametrize(
    "feedback", ["none", *(pytest.param(f, marks=pytest.mark.soak) for f in ("residual", "double"))]
)
def test_with_few_elements_a_step_feedback_is_what_brings_it_to_the_middle(feedback):
    codec = TopK(density=0.25, feedback=feedback)
    run = simulate(Sync(), Bowl(lr=0.1), workers=4, steps=100, start=[9.0] * 16, codec=codec)
    assert all(torch.equal(run.worker(k).x, run.worker(0).x) for k in range(4))
    assert ((run.worker(0).x - 1.5).abs().max() < 0.25) == (feedback != "none")


# -- hostile ---------------------------------------------------------------------------------------


def test_a_payload_of_another_codec_or_dtype_is_refused():
    stream, values = gaps.pack(torch.tensor([2, 5]), 50), torch.tensor([1.0, 2.0])
    good = seal(9, 50, 2, stream, values)
    assert TopK().decode(good, torch.empty(50)).count_nonzero() == 2
    with pytest.raises(WireError):
        TopK().decode(seal(8, 50, 2, stream, values), torch.empty(50))
    with pytest.raises(WireError):
        TopK().decode(good, torch.empty(50, dtype=torch.float64))
    with pytest.raises(WireError):
        TopK().decode(good, torch.empty(51))
