"""TernGrad: trits that are right on average, and what they lack kept where that is asked for."""

import copy
from dataclasses import replace

import pytest
import torch

from sampling import sampled
from shoal.codecs import Ternary
from shoal.codecs.packing import packed, unpacked
from shoal.codecs.ternary import trits
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError
from shoal.kernels import dispatch

LENGTHS = [1, 15, 16, 255, 256, 257, 2047, 2048, 2049, 5000]  # around the borders of rows, groups and blocks


def whole_numbers(length, seed=0, most=9):
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, (length,), generator=chance).float()


def normal(length, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def round_trip(codec, v, seed=0):
    payload, _ = codec.encode(v, codec.init(v, seed))
    return codec.decode(payload, torch.empty_like(v))


def many(codec, v, times):
    """What arrives when the same is sent so many times."""
    state, outs = codec.init(v, seed=5), []
    for _ in range(times):
        payload, state = codec.encode(v, state)
        outs.append(codec.decode(payload, torch.empty_like(v)))
    return torch.stack(outs).double()


# -- by hand ---------------------------------------------------------------------------------------


def test_two_blocks_and_a_short_one():
    # scales 2, 0 and 4; elements as large as the scale, or 0, leave nothing to chance
    v = torch.tensor([2.0, -2, 0, 2, 0, 0, 0, 0, -4, 4])
    codec = Ternary(clip=0, block=4)
    (_, codes, scales), _ = codec.encode(v, codec.init(v))
    assert scales.tolist() == [2, 0, 4]
    assert unpacked(codes, 2, 10).tolist() == [1, 3, 0, 1, 0, 0, 0, 0, 3, 1]  # -1 is 3 in two bits
    assert round_trip(codec, v).tolist() == v.tolist()


def test_a_draw_and_an_element_make_a_scale_or_not():
    # 3/4 of the scale and a draw from 1 1/4 on make 2; -1/4 needs one of 1 3/4; what is beyond needs none
    step = 2.0**-23
    draws = torch.tensor([1.0, 1.25 - step, 1.25, 1.75 - step, 1.75, 2 - step])
    table, scales = draws.view(torch.int32), torch.tensor([4.0])
    mask, flips = (torch.tensor([bits], dtype=torch.int32) for bits in (0, 2**23 - 1))
    for element, unflipped, flipped in (
        (3.0, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]),  # 1 + x becomes 2 - x, less a step
        (-1.0, [2, 2, 2, 2, 3, 3], [3, 3, 2, 2, 2, 2]),
        (4.0, [1] * 6, [1] * 6),
        (-9.0, [3] * 6, [3] * 6),
        (0.0, [0] * 6, [0] * 6),
    ):
        for bits, codes in ((mask, unflipped), (flips, flipped)):
            written = trits.written(torch.full((6,), element), scales, 6, table, bits)
            assert unpacked(written, 2, 6).tolist() == codes
    zeros = trits.written(torch.zeros(6), torch.zeros(1), 6, table, mask)
    assert unpacked(zeros, 2, 6).tolist() == [0] * 6


def test_the_upper_bit_is_a_sign_the_lower_one_says_whether_it_is_not_zero():
    out = trits.read(packed(torch.tensor([0, 1, 2, 3]), 2), torch.tensor([7.0]), 4, torch.empty(4))
    assert out.tolist() == [0, 7, 0, -7]


def test_what_is_beyond_the_clip_counts_as_that():
    # 15 ones and a 7: the mean square is (15 + 49) / 16 = 4, the deviation 2, the clip 1.5 times that
    v = torch.ones(16)
    v[3] = -7
    codec = Ternary(clip=1.5, block=16)
    (_, _, scales), _ = codec.encode(v, codec.init(v))
    assert scales.tolist() == [3]
    assert (many(codec, v, 50)[:, 3] == -3).all()


def test_a_block_of_equal_elements_is_not_clipped_away():
    v = torch.full((300,), -0.3)
    assert torch.equal(round_trip(Ternary(), v), v)


@pytest.mark.parametrize("tiny", [1e-12, 1e-23])
def test_small_blocks_keep_their_own_scale(tiny):
    v = torch.cat([tiny * normal(2048), normal(2048, seed=1)])
    out = round_trip(Ternary(), v)
    assert 0 < out[:2048].abs().max() < 4 * tiny


def test_large_blocks_do_not_overflow():
    v = 1e37 * normal(2048).clamp(-3, 3)
    assert round_trip(Ternary(), v).isfinite().all()


@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_two_bits_for_each_element_and_four_bytes_for_each_block(length):
    payload, _ = Ternary().encode(normal(length), Ternary().init(normal(length)))
    groups, blocks = -(-length // 256), -(-length // 2048)
    assert sum(part.nbytes for part in payload) == HEADER.size + 64 * groups + 4 * blocks


# -- chance ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", [256, pytest.param(100, marks=pytest.mark.soak)])  # the kernel, and torch
def test_on_average_an_element_arrives_as_it_is(block):
    # 300 means of 4000, each within 5 of its standard deviations: by chance less than twice in 10,000 runs
    v, times = normal(300), 4000
    codec = Ternary(clip=0, block=block)
    outs, scale = many(codec, v, times), trits.scale(v, 0, block).repeat_interleave(block)[:300].double()
    variance = v.abs() * scale - v.double() ** 2
    assert ((outs.mean(0) - v).abs() <= 5 * (variance / times).sqrt() + 1e-6 * scale).all()
    seen = (outs - v).square().mean(0)
    assert ((seen - variance).abs() <= 0.15 * scale**2).all()


@pytest.mark.slow
@pytest.mark.soak
def test_with_a_clip_the_average_is_the_clipped_element():
    v, times = normal(2048), 2000
    codec = Ternary(clip=1.0)
    limit = v.double().square().mean().sqrt()
    clipped = v.double().clamp(-limit, limit)
    outs = many(codec, v, times)
    spread = (clipped.abs() * limit - clipped**2).clamp(min=0)
    assert ((outs.mean(0) - clipped).abs() <= 5.5 * (spread / times).sqrt() + 1e-5).all()


@pytest.mark.slow
@pytest.mark.soak
def test_neither_neighbours_nor_blocks_draw_alike():
    # correlations over 4000 draws, of elements of half the scale; 5 standard deviations of what chance does
    v = torch.full((3 * 256,), 0.5)
    v[::256] = 1.0
    outs = many(Ternary(clip=0, block=256), v, 4000) - 0.5
    places = [1, 2, 7, 8, 17, 33, 255, 257, 258, 263, 264, 511, 513, 519, 600]
    near = torch.corrcoef(outs[:, places].T) - torch.eye(len(places), dtype=torch.float64)
    assert near.abs().max() < 5 / 4000**0.5
    after = (outs[1:, 1] * outs[:-1, 1]).mean() * 4
    assert abs(after) < 5 / 4000**0.5


def test_other_seeds_draw_otherwise():
    v = normal(3000)
    assert not torch.equal(round_trip(Ternary(), v, seed=1), round_trip(Ternary(), v, seed=2))


# -- feedback --------------------------------------------------------------------------------------


def test_what_was_sent_and_what_is_left_are_what_was_given():
    # whole numbers whose largest is the scale: nothing is rounded
    codec = Ternary(clip=0, feedback="residual")
    rest, given, sent = torch.zeros(5000), torch.zeros(5000), torch.zeros(5000)
    state = codec.init(rest)
    for step in range(8):
        v = whole_numbers(5000, seed=step)
        given += v
        payload, state = codec.encode_rest(v, rest, state)
        sent += codec.decode(payload, torch.empty(5000))
        assert torch.equal(sent + rest, given)


@pytest.mark.parametrize(("clip", "most"), [(None, 1.2), (2.5, 20.0)])
def test_the_rest_stays_within_bounds(clip, most):
    codec, rest = Ternary(clip=clip, feedback="residual"), torch.zeros(4096)
    state = codec.init(rest)
    for step in range(200):
        _, state = codec.encode_rest(normal(4096, seed=step), rest, state)
    assert rest.norm() < most * 64  # that of a vector is about the root of 4096


def test_less_is_kept_back_by_a_clip_that_goes_with_feedback():
    kept, lost = Ternary(feedback="residual"), Ternary()
    assert (kept.deviations, lost.deviations) == (1.5, 2.5)
    assert replace(kept, feedback="none").deviations == 2.5
    assert Ternary(clip=3.0, feedback="residual").deviations == 3.0
    assert kept.merged.deviations == Ternary(feedback="double").merged.deviations == 1.5


# -- kernels ---------------------------------------------------------------------------------------


@pytest.fixture
def lines_of_torch(monkeypatch):
    """Call it, and there are no kernels any more."""
    return lambda: monkeypatch.setattr(dispatch, "_has_numba", lambda: False)


@pytest.mark.parametrize(("clip", "block", "length"), sampled([0, 2.5, 1.0], [256, 2048], LENGTHS))
def test_the_kernel_gives_the_bits_of_the_lines_of_torch_where_sums_are_exact(
    lines_of_torch, clip, block, length
):
    codec = Ternary(clip=clip, block=block)
    v, rest = whole_numbers(length), whole_numbers(length, seed=1) / 2
    state, fast, plain = codec.init(v, seed=2), rest.clone(), rest.clone()
    mine = codec.encode(v, state)[0], codec.encode_rest(v, fast, state)[0]
    outs = [codec.decode(payload, torch.empty(length)) for payload in mine]
    lines_of_torch()
    theirs = codec.encode(v, state)[0], codec.encode_rest(v, plain, state)[0]
    for one, other, out in zip(mine, theirs, outs, strict=True):
        assert all(map(torch.equal, one, other))
        assert torch.equal(codec.decode(other, torch.empty(length)).view(torch.int32), out.view(torch.int32))
    assert torch.equal(fast, plain)


@pytest.mark.parametrize("clip", [1.0, 2.5])
@pytest.mark.parametrize("late", [40.0, 2.0**60, 2.0**-70])
def test_the_largest_of_a_block_may_come_late(lines_of_torch, clip, late):
    codec, v = Ternary(clip=clip), whole_numbers(3 * 2048)
    v[:300] = 0  # nothing of the first block shows at once what is beyond the clip
    v[[1000, 2048 + 1000]] = late  # in the second, smaller things may
    payloads = [codec.encode(v, codec.init(v))[0]]
    lines_of_torch()
    payloads.append(codec.encode(v, codec.init(v))[0])
    (_, codes, scales), (_, codes_too, scales_too) = payloads
    assert torch.allclose(scales, scales_too, rtol=1e-6, atol=0)
    assert (unpacked(codes, 2, len(v)) != unpacked(codes_too, 2, len(v))).sum() <= 1


@pytest.mark.parametrize("size", [1e-35, 1e-23, 1e-13, 1.0, 1e20, 1e37])
def test_elsewhere_their_scales_differ_in_the_last_places(lines_of_torch, size):
    codec, v = Ternary(), size * normal(50_000).clamp(-3, 3)
    (_, codes, scales), _ = codec.encode(v, codec.init(v))
    lines_of_torch()
    (_, codes_too, scales_too), _ = codec.encode(v, codec.init(v))
    assert torch.allclose(scales, scales_too, rtol=1e-6, atol=0)
    assert (unpacked(codes, 2, 50_000) != unpacked(codes_too, 2, 50_000)).sum() <= 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_so(bad):
    codec, v, rest = Ternary(), normal(5 * 2048), torch.zeros(5 * 2048)
    v[3000] = bad
    payload, _ = codec.encode_rest(v, rest, codec.init(v))
    out = codec.decode(payload, torch.empty(5 * 2048))
    for seen in (out, rest):
        assert seen[2048:4096].isnan().all()
        assert seen[:2048].isfinite().all() and seen[4096:].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_codes_of_a_block_that_is_not_finite_are_0(lines_of_torch, bad):
    """And what is behind the end: a processor may choose the sign of what is not a number."""
    codec, v = Ternary(), normal(2048 + 300)
    v[2048 + 290] = bad
    (_, codes, _), _ = codec.encode(v, codec.init(v))
    assert not codes[2048 // 16 :].any() and codes[: 2048 // 16].all()
    lines_of_torch()
    assert torch.equal(codec.encode(v, codec.init(v))[0][1], codes)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clip": -1.0}, "clip=-1.0 should be 0, which clips nothing, or a number such as 2.5"),
        ({"clip": 1e-30}, "clip=1e-30"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"clip": float("inf")}, "clip=inf"),
        ({"block": 0}, "block=0"),
        ({"feedback": "some"}, "feedback='some'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Ternary(**options)


@pytest.mark.parametrize("lines", ["kernel", "torch"])
def test_each_part_of_a_payload_is_checked(lines, lines_of_torch):
    if lines == "torch":
        lines_of_torch()
    (_, codes, scales), _ = Ternary().encode(normal(3000), Ternary().init(normal(3000)))
    below = -scales
    for count, *bodies in (
        (1, codes, scales),
        (3, codes, scales),
        (2, codes[:-1], scales),
        (2, codes, scales[:-1]),
        (2, codes.long(), scales),
        (2, codes, scales.double()),
        (2, codes),
        (2, scales, codes),
        (2, codes, scales, scales),
        (2, codes, below),
    ):
        with pytest.raises(WireError):
            Ternary().decode(seal(Ternary.code, 3000, count, *bodies), torch.empty(3000))
    with pytest.raises(WireError):  # another block
        Ternary(block=4096).decode(seal(Ternary.code, 3000, 2, codes, scales), torch.empty(3000))


def test_a_copied_state_goes_on_with_the_same_bits():
    codec, rest = Ternary(feedback="residual"), torch.zeros(5000)
    state = codec.init(rest, seed=4)
    for seed in range(3):
        _, state = codec.encode_rest(normal(5000, seed), rest, state)
    saved, other = copy.deepcopy(state), rest.clone()
    one, state = codec.encode_rest(normal(5000, 9), rest, state)
    two, saved = codec.encode_rest(normal(5000, 9), other, saved)
    assert all(map(torch.equal, one, two)) and torch.equal(rest, other)
    assert all(torch.equal(state[name], saved[name]) for name in state)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("clip", "block", "length"), sampled([0, 2.5], [256, 768, 2048, 4096], [*LENGTHS, 1_000_003])
)
def test_a_gpu_gives_what_the_lines_of_torch_give(lines_of_torch, clip, block, length):
    lines_of_torch()
    codec = Ternary(clip=clip, block=block)
    for make in (whole_numbers, normal):
        v, rest = make(length), make(length, seed=1)
        state, there = codec.init(v), rest.cuda()
        (_, codes, scales), _ = codec.encode_rest(v, rest, state)
        payload, _ = codec.encode_rest(v.cuda(), there, state)
        assert torch.allclose(scales, payload[2].cpu(), rtol=0 if clip == 0 else 1e-5, atol=0)
        apart = unpacked(codes, 2, length) != unpacked(payload[1].cpu(), 2, length)
        assert apart.sum() <= (0 if clip == 0 else 2 + length * 1e-5)
        assert torch.allclose(rest[~apart], there.cpu()[~apart], rtol=0, atol=0 if clip == 0 else 1e-4)
        out = codec.decode(payload, torch.empty(length, device="cuda"))
        assert torch.equal(out.cpu(), codec.decode(tuple(p.cpu() for p in payload), torch.empty(length)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_on_a_gpu_too_the_codes_of_a_block_that_is_not_finite_are_0(bad):
    codec, v = Ternary(), normal(2048 + 300).cuda()
    v[2048 + 290] = bad
    rest = torch.zeros_like(v)
    for (_, codes, _), _ in (codec.encode(v, codec.init(v)), codec.encode_rest(v, rest, codec.init(v))):
        assert not codes[2048 // 16 :].any() and codes[: 2048 // 16].all()
    assert rest[2048:].isnan().all() and rest[:2048].isfinite().all()
