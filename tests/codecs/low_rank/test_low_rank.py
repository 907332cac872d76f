"""Low rank as a codec: which layers are written as P and Q, what comes back, what is remembered."""

import copy

import pytest
import torch

from shoal.codecs import LowRank
from shoal.codecs.low_rank.power_sgd import RIGHT
from shoal.codecs.wire import HEADER, seal
from shoal.core.codec import Codec
from shoal.core.errors import WireError
from shoal.core.matrices import Matrices, Matrix, orthonormal
from shoal.core.vector import Layout

SHAPES = {
    "a.weight": (12, 20),
    "a.bias": (12,),
    "conv.weight": (10, 3, 3, 3),
    "b.weight": (2, 12),
    "b.bias": (2,),
}
LAYOUT = Layout(tuple(SHAPES), tuple(map(torch.Size, SHAPES.values())))
WEIGHT, KERNEL = slice(0, 240), slice(252, 522)


def fitted(rank=2, layout=LAYOUT, **options):
    return LowRank(rank, **options).fit(layout.pieces(0, layout.numel))


def square(rank=1, side=5):
    return LowRank(rank).fit(Layout(("w",), (torch.Size((side, side)),)).pieces(0, side * side))


def drawn(length=LAYOUT.numel, dtype=torch.float32, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(codec, v, state=None):
    payload, state = codec.encode(v, codec.init(v) if state is None else state)
    return codec.decode(payload, torch.empty_like(v)), state


# -- by hand ---------------------------------------------------------------------------------------


def test_a_single_number_comes_back_by_hand():
    # M = 3 e0 e1': M Q is a multiple of e0, so P = +-e0, Q = M' P = +-3 e1, and P Q' = 3 e0 e1'
    m = torch.zeros(5, 5)
    m[0, 1] = 3.0
    codec = square()
    (_, p, q, others), _ = codec.encode(m.flatten(), codec.init(m.flatten()))
    sign = p[0].sign()
    assert torch.allclose(p, sign * torch.tensor([1.0, 0, 0, 0, 0]))
    assert torch.allclose(q, sign * torch.tensor([0, 3.0, 0, 0, 0]))
    assert others.numel() == 0
    assert torch.allclose(round_trip(codec, m.flatten())[0], m.flatten())


def test_two_steps_of_the_power_method_by_hand():
    # M is diagonal, 2 and 1 at its beginning. With Q = (x, y, ...) / length:
    # M Q ~ (2x, y), Q' = M' P ~ (4x, y), and the next step has M Q ~ (8x, y): P nears e0, where M is largest
    m = torch.diag(torch.tensor([2.0, 1, 0, 0, 0]))
    codec = square()
    state = codec.init(m.flatten())
    x, y = state["right"][:2].tolist()
    for left in ((2 * x, y), (8 * x, y)):
        (_, p, _, _), state = codec.encode(m.flatten(), state)
        expected = torch.tensor([*left, 0, 0, 0]) / torch.tensor(left).norm()
        assert torch.allclose(p * p[0].sign(), expected * expected[0].sign(), atol=1e-6)


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_that_rank_comes_back_in_one_step(rank):
    a, b = drawn(20 * rank).view(20, rank), drawn(30 * rank, seed=1).view(rank, 30)
    v = (a @ b).flatten()
    codec = LowRank(rank).fit(Layout(("w",), (torch.Size((20, 30)),)).pieces(0, 600))
    assert torch.allclose(round_trip(codec, v)[0], v, atol=1e-5)


def test_of_full_rank_nothing_is_lost():
    # the codec itself would send such a matrix as it is
    v = drawn(30).double()
    matrices = Matrices(5, (Matrix(0, 6, 5),))
    p = orthonormal(matrices.lefts(matrices.left(v, matrices.first_right(v))), v)
    got = matrices.fill(torch.empty_like(v), p, matrices.right(v, p), v.new_empty(0))
    assert torch.allclose(got, v, atol=1e-12)


def test_a_rank_too_high_to_save_anything_sends_all_as_it_is():
    v = drawn()
    codec = fitted(rank=4)  # 2 * 4 * (12 + 20) = 256, more than 240; 2 * 4 * 37 = 296, more than 270
    assert torch.equal(round_trip(codec, v)[0], v)
    assert codec.feedback == "none" and codec.init(v) == {}


def test_what_is_no_matrix_comes_back_bit_for_bit():
    v = drawn()
    got, _ = round_trip(fitted(), v)
    for part in (slice(240, 252), slice(522, None)):
        assert torch.equal(got[part], v[part])
    for part in (WEIGHT, KERNEL):
        assert not torch.allclose(got[part], v[part], atol=0.1)


def test_a_kernel_is_a_matrix_with_a_row_for_each_output():
    rows, columns = drawn(10).view(10, 1), drawn(27, seed=1).view(1, 27)
    v = torch.zeros(LAYOUT.numel)
    v[KERNEL] = (rows @ columns).flatten()
    assert torch.allclose(round_trip(fitted(rank=1), v)[0], v, atol=1e-6)


def test_many_steps_come_near_the_best_there_is():
    v = drawn(1200)
    codec = LowRank(2).fit(Layout(("w",), (torch.Size((30, 40)),)).pieces(0, 1200))
    state, errors = None, []
    for _ in range(60):
        got, state = round_trip(codec, v, state)
        errors.append(float((got - v).norm()))
    best = float(torch.linalg.svdvals(v.view(30, 40))[2:].norm())
    assert errors[0] > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_with_the_rest_given_back_all_arrives_in_time():
    # what one step lacks is in the rest, and what is given again and again arrives
    codec, v = fitted(rank=1), drawn()
    state, rest, sent = codec.init(v), torch.zeros_like(v), torch.zeros_like(v)
    for step in range(1, 41):
        payload, state = codec.encode_rest(v, rest, state)
        sent += codec.decode(payload, torch.empty_like(v))
        assert torch.allclose(sent + rest, step * v, atol=2e-4)
    assert float((sent / 40 - v).norm()) < 0.2 * float(v.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_one_matrix_after_the_other_sends_and_keeps_what_all_at_once_would(dtype):
    codec, v, rest = fitted(), drawn(dtype=dtype), drawn(dtype=dtype, seed=1)
    want_rest, state = rest.clone(), codec.init(v)
    want, want_state = Codec.encode_rest(codec, v, want_rest, state)
    got, got_state = codec.encode_rest(v, rest, state)
    assert all(map(torch.equal, got, want))
    assert torch.equal(rest, want_rest)
    assert torch.equal(got_state[RIGHT], want_state[RIGHT])


def test_without_it_the_same_is_lost_again_and_again():
    codec, v, state = fitted(rank=1), drawn(), None
    sent = torch.zeros_like(v)
    for _ in range(40):
        got, state = round_trip(codec, v, state)
        sent += got
    assert float((sent / 40 - v).norm()) > 0.5 * float(v.norm())


@pytest.mark.parametrize("rank", [1, 2])
def test_bytes_are_those_of_the_two_factors_and_the_rest(rank):
    v = drawn()
    payload, _ = fitted(rank).encode(v, fitted(rank).init(v))
    numbers = rank * (12 + 20 + 10 + 27) + 12 + 24 + 2  # b.weight, 2 x 12, would not get shorter
    assert sum(part.nbytes for part in payload) == HEADER.size + 4 * numbers


# -- what a node has to know -----------------------------------------------------------------------


def test_a_layer_that_is_cut_is_sent_as_it_is():
    v = drawn()
    for begin, end in ((1, LAYOUT.numel), (0, 500)):
        codec = LowRank(1).fit(LAYOUT.pieces(begin, end))
        got, _ = round_trip(codec, v[begin:end])
        cut = slice(0, 239) if begin else slice(252, 500)
        whole = slice(251, 521) if begin else WEIGHT
        assert torch.equal(got[cut], v[begin:end][cut])
        assert not torch.equal(got[whole], v[begin:end][whole])


def test_all_begin_with_the_same_q_whatever_their_seed():
    v, codec = drawn(), fitted()
    assert torch.equal(codec.init(v, seed=1)["right"], codec.init(v, seed=2)["right"])


def test_averages_of_several_are_sent_whole_unless_their_rest_is_kept():
    assert torch.equal(round_trip(fitted().merged, drawn())[0], drawn())
    double = fitted(feedback="double")
    assert double.merged is double


def test_a_gradient_of_zeros_harms_nothing_that_comes_after():
    codec, zeros = fitted(), torch.zeros(LAYOUT.numel)
    got, state = round_trip(codec, zeros)
    assert not got.any()
    one = zeros.clone()
    one[WEIGHT] = 1.0  # of rank 1
    got, state = round_trip(codec, one, state)
    got, state = round_trip(codec, one, state)
    assert torch.allclose(got, one, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_and_forgotten(bad):
    codec, v = fitted(), drawn()
    _, state = round_trip(codec, v)
    spoilt = v.clone()
    spoilt[7] = bad
    got, after = round_trip(codec, spoilt, state)
    assert not got.isfinite().all()
    assert round_trip(codec, v, after)[0].isfinite().all()


@pytest.mark.parametrize("scale", [1e-18, 1e15])
def test_sizes_whose_squares_are_out_of_range_do_no_harm(scale):
    codec, v = square(), torch.outer(drawn(5), drawn(5, seed=1)).flatten() * scale
    state = None
    for _ in range(3):
        got, state = round_trip(codec, v, state)
        assert torch.allclose(got / scale, v / scale, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_single(dtype):
    codec, v = fitted(), (1000 * drawn()).to(dtype)
    payload, state = codec.encode(v, codec.init(v))
    assert [part.dtype for part in payload[1:]] == [torch.float32, torch.float32, dtype]
    assert state["right"].dtype == torch.float32
    wide, _ = round_trip(codec, v.float())
    got = codec.decode(payload, torch.empty_like(v))
    assert torch.allclose(got.float(), wide, rtol=2 * torch.finfo(dtype).eps, atol=1.0)


def test_a_copied_state_goes_on_with_the_same_bits():
    codec, state, rest = fitted(), None, torch.zeros(LAYOUT.numel)
    state = codec.init(rest)
    for seed in range(3):
        _, state = codec.encode_rest(drawn(seed=seed), rest, state)
    saved, kept = copy.deepcopy(state), rest.clone()
    first, _ = codec.encode_rest(drawn(seed=9), rest, state)
    second, _ = codec.encode_rest(drawn(seed=9), kept, saved)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("wrong", ["rank=0", "feedback='often'"])
def test_wrong_options_are_refused(wrong):
    name, _, value = wrong.partition("=")
    with pytest.raises(ValueError, match=name):
        LowRank(**{name: int(value) if value.isdigit() else value})


# -- hostile payloads ------------------------------------------------------------------------------


def parts_of(codec):
    v = drawn()
    (_, p, q, others), _ = codec.encode(v, codec.init(v))
    return p, q, others


@pytest.mark.parametrize(
    "tamper",
    [
        lambda p, q, o: (p[:-1], q, o),
        lambda p, q, o: (p, q[:-1], o),
        lambda p, q, o: (p, q, o[:-1]),
        lambda p, q, o: (q, p, o),
        lambda p, q, o: (p.double(), q, o),
        lambda p, q, o: (p, q.half(), o),
        lambda p, q, o: (p, q, o.to(torch.int64)),
        lambda p, q, o: (p, q),
        lambda p, q, o: (p, q, o, o),
        lambda p, q, o: (torch.cat([p, p]), q, o),
    ],
)
def test_bodies_that_do_not_fit_are_refused(tamper):
    codec = fitted()
    payload = seal(LowRank.code, LAYOUT.numel, 2, *tamper(*parts_of(codec)))
    with pytest.raises(WireError, match="was expected"):
        codec.decode(payload, torch.empty(LAYOUT.numel))


@pytest.mark.parametrize(
    ("code", "elements", "rank"), [(12, 548, 2), (13, 547, 2), (13, 548, 1), (13, 548, 2**63)]
)
def test_headers_that_do_not_fit_are_refused(code, elements, rank):
    codec = fitted()
    payload = seal(code, elements, rank, *parts_of(codec))
    with pytest.raises(WireError, match="expected"):
        codec.decode(payload, torch.empty(LAYOUT.numel))


def test_another_rank_is_refused():
    payload, _ = fitted(1).encode(drawn(), fitted(1).init(drawn()))
    with pytest.raises(WireError, match="of rank 1 arrived where rank 2"):
        fitted(2).decode(payload, torch.empty(LAYOUT.numel))
