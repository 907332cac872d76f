"""A threshold: a sign for what exceeds it, and what waits below."""

import copy

import pytest
import torch

from sampling import sampled
from shoal.codecs.sparse import gaps, selection
from shoal.codecs.sparse.codec import Sparse
from shoal.codecs.sparse.threshold import Threshold
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(selection, "on_cpu", lambda *tensors: False)
        monkeypatch.setattr(gaps, "on_cpu", lambda *tensors: False)


def drawn(elements, seed=0):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def decoded(codec, payload, like):
    return codec.decode(payload, torch.full_like(like, 7))


# -- on paper --------------------------------------------------------------------------------------


def test_what_exceeds_tau_travels_as_tau_with_its_sign(lines):
    codec, v = Threshold(tau=2.0), torch.tensor([2.0, 2.5, -9.0, 0.0, -2.0])
    (header, stream, tau), _ = codec.encode(v, {})
    assert HEADER.unpack(bytes(header.tolist()))[2:6] == (11, 0, 5, 2)
    # positions 1 and 2 of 5: k = 1, gaps 1 = 0 * 2 + 1 and 0; low bits and signs 1 0, 0 1; then 1 1
    assert stream.tolist() == [0b1001, 0b11] and tau.tolist() == [2.0]
    assert decoded(codec, (header, stream, tau), v).tolist() == [0.0, 2.0, -2.0, 0.0, 0.0]


def test_at_most_one_tau_a_step_and_the_rest_waits(lines):
    codec, rest, v = Threshold(tau=2.0), torch.zeros(3), torch.tensor([1.5, -5.0, 0.5])
    got = []
    for _ in range(4):
        payload, _ = codec.encode_rest(v, rest, {})
        got.append((decoded(codec, payload, v).tolist(), rest.tolist()))
    assert got == [
        ([0.0, -2.0, 0.0], [1.5, -3.0, 0.5]),
        ([2.0, -2.0, 0.0], [1.0, -6.0, 1.0]),  # the second falls behind: 5 a step come, 2 go
        ([2.0, -2.0, 0.0], [0.5, -9.0, 1.5]),
        ([0.0, -2.0, 0.0], [2.0, -12.0, 2.0]),  # 2 does not exceed 2: it goes with the next
    ]


def test_what_comes_in_taus_is_sent_a_step_late(lines):
    codec, rest = Threshold(tau=1.0), torch.zeros(4)
    v = torch.tensor([1.0, -1.0, 0.0, 1.0])
    first, _ = codec.encode_rest(v, rest, {})
    assert not decoded(codec, first, v).any()
    second, _ = codec.encode_rest(v, rest, {})
    assert torch.equal(decoded(codec, second, v), v) and torch.equal(rest, v)


# -- what it promises ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tau", "elements"), sampled(DTYPES, [4.0, None], [0, 1, 5, 4097]))
def test_what_is_sent_and_what_waits_is_all_there_was(elements, tau, dtype, lines):
    # In whole numbers and whole taus this is exact. Where tau is found it is some float: each step rounds
    # once, by at most half a unit in the last place of at most 64.
    codec, rest = Threshold(tau=tau, density=0.02), torch.zeros(elements, dtype=dtype)
    total, sent = (torch.zeros(elements, dtype=torch.float64) for _ in range(2))
    error = 0.0 if tau else 64 * torch.finfo(dtype).eps / 2
    for step in range(5):
        v = drawn(elements, step).mul(3).round().to(dtype)
        total += v.double()
        payload, _ = codec.encode_rest(v, rest, {})
        sent += decoded(codec, payload, v).double()
        bound = (2 * step + 2) * error  # the sum with the rest is rounded, and the difference
        assert (sent + rest.double() - total).abs().le(bound).all()


def test_kernel_and_torch_leave_the_same_rest_and_send_the_same_bytes(monkeypatch):
    for codec in (Threshold(tau=1.5), Threshold(density=0.05)):
        ours, theirs = torch.zeros(9001), torch.zeros(9001)
        for step in range(4):
            fast, _ = codec.encode_rest(drawn(9001, step), ours, {})
            with monkeypatch.context() as patch:
                patch.setattr(selection, "on_cpu", lambda *tensors: False)
                patch.setattr(gaps, "on_cpu", lambda *tensors: False)
                slow, _ = codec.encode_rest(drawn(9001, step), theirs, {})
            assert all(map(torch.equal, fast, slow)) and torch.equal(ours, theirs)


def test_all_who_receive_all_hold_the_same_in_any_order():
    codec, x = Threshold(tau=0.5), [torch.zeros(2000) for _ in range(3)]
    payloads = [codec.encode(drawn(2000, seed), {})[0] for seed in range(3)]
    for here, order in zip(x, ((0, 1, 2), (2, 0, 1), (1, 2, 0)), strict=True):
        for k in order:
            here += codec.decode(payloads[k], torch.empty(2000))
    assert torch.equal(x[0], x[1]) and torch.equal(x[0], x[2]) and x[0].any()


def test_at_most_eleven_bits_for_each_of_36_in_10000():
    v = torch.zeros(1_000_000)
    chosen = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) < 0.0036
    v[chosen] = torch.where(drawn(int(chosen.sum())) > 0, 3.0, -3.0)
    payload, _ = Threshold(tau=1.0).encode(v, {})
    assert 8 * sum(part.nbytes for part in payload) / int(chosen.sum()) <= 11
    assert 4_000_000 / sum(part.nbytes for part in payload) > 800  # 834 is the published figure


# -- tau that is found -----------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.3, 0.01, 0.0036])
def test_as_many_travel_as_are_wanted(density):
    # up to what a sample of 65536 says: 4 standard deviations of its count, and 0.99 for a little below
    codec, rest, counts = Threshold(density=density), torch.zeros(400_000), []
    for step in range(6):
        payload, _ = codec.encode_rest(drawn(400_000, step), rest, {})
        counts.append(HEADER.unpack(bytes(payload[0].tolist()))[5] / 400_000)
    assert all(0.75 * density < share < 1.4 * density for share in counts)


def test_it_follows_gradients_that_shrink_and_grow():
    codec = Threshold(density=0.01)
    for scale in (1.0, 1e-6, 1e6):
        payload, _ = codec.encode(drawn(100_000) * scale, {})
        assert float(payload[2]) == pytest.approx(2.576 * 0.99 * scale, rel=0.03)  # of a normal distribution


def test_equal_magnitudes_all_travel_rather_than_none():
    v = torch.full((1000,), 3.0).index_fill_(0, torch.arange(10), -3.0)
    for dtype in DTYPES:
        payload, _ = Threshold().encode(v.to(dtype), {})
        assert torch.allclose(decoded(Threshold(), payload, v.to(dtype)).float(), v, rtol=0.02)


def test_where_fewer_are_not_zero_than_may_travel_tau_is_their_mean():
    v = torch.zeros(300_001)  # a sample of every fourth element meets none of these three
    v[[1, 2, 3]] = torch.tensor([1.0, -2.0, 6.0])
    payload, _ = Threshold(density=0.01).encode(v, {})
    assert payload[2].tolist() == [3.0]
    assert decoded(Threshold(), payload, v).nonzero().flatten().tolist() == [3]


def test_the_smallest_and_the_largest_numbers_have_a_tau_too():
    for size in (1e-45, 3e38):
        v = torch.full((10,), size)
        payload, _ = Threshold().encode(v, {})
        assert 0 < float(payload[2]) < INF


# -- what is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("codec", [Threshold(tau=2.0), Threshold(), Threshold(density=0.5)])
def test_what_is_not_finite_arrives_as_not_a_number_and_stays(bad, codec, lines):
    rest, v = torch.zeros(100), drawn(100)
    v[17] = bad
    payload, _ = codec.encode_rest(v, rest, {})
    assert decoded(codec, payload, v)[17].isnan()
    assert not rest[17].isfinite()
    assert decoded(codec, codec.encode(torch.full((5,), bad), {})[0], torch.empty(5)).isnan().all()


# -- options ---------------------------------------------------------------------------------------


def test_options():
    assert Threshold().merged == Sparse() and Threshold(feedback="double").merged.feedback == "double"
    for tau in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match="should be above 0"):
            Threshold(tau=tau)
    with pytest.raises(ValueError, match="density"):
        Threshold(density=2.0)
    with pytest.raises(ValueError, match=r"tau=1e-09 is out of the range of torch\.float16"):
        Threshold(tau=1e-9).encode(torch.ones(3, dtype=torch.float16), {})


def test_a_copied_rest_goes_on_alike():
    codec, rest = Threshold(), torch.zeros(1000)
    for step in range(3):
        codec.encode_rest(drawn(1000, step), rest, {})
    saved = copy.deepcopy(rest)
    first, second = (codec.encode_rest(drawn(1000, 9), r, {})[0] for r in (rest, saved))
    assert all(map(torch.equal, first, second)) and torch.equal(rest, saved)


# -- hostile ---------------------------------------------------------------------------------------


def bad_payloads():
    stream, tau = gaps.pack(torch.tensor([2, 5]), 50, torch.tensor([True, False])), torch.tensor([2.0])
    yield seal(11, 50, 3, stream, tau)
    yield seal(11, 50, 1, stream, tau)
    yield seal(11, 50, 2, gaps.pack(torch.tensor([2, 5]), 50), tau)  # without signs
    yield seal(11, 50, 2, stream, tau.double())
    yield seal(11, 50, 2, stream, torch.tensor([2.0, 2.0]))
    yield seal(11, 50, 2, stream, torch.tensor([0.0]))
    yield seal(11, 50, 2, stream, torch.tensor([-2.0]))
    yield seal(11, 50, 2, stream, torch.tensor([INF]))
    yield seal(11, 50, 2, tau, stream)
    yield seal(11, 50, 2, stream)
    yield seal(11, 50, 2, stream, tau, tau)
    yield seal(11, 50, 2**63, stream, tau)
    yield seal(11, 49, 2, stream, tau)
    yield seal(8, 50, 2, stream, tau)
    yield ()


@pytest.mark.parametrize("payload", [*bad_payloads()])
def test_a_wrong_payload_is_refused(payload, lines):
    with pytest.raises(WireError):
        Threshold().decode(payload, torch.empty(50))
