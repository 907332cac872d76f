"""What every codec promises, whoever wrote it: over the table of all of them, and of all strategies."""

import copy
from itertools import product

import pytest
import torch

from shoal.codecs import CODECS
from shoal.core.codec import FEEDBACK
from shoal.core.errors import WireError
from shoal.core.vector import Layout

WORDS = [word for word in CODECS if word != "none"]
LENGTHS = [0, 1, 2, 7, 8, 9, 63, 511, 512, 513, 2047, 2049, 5000]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def made(word):
    return CODECS.make(word).fit(())


def drawn(length, dtype=torch.float32, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("word", WORDS)
def test_every_length_comes_back_and_the_vector_is_left_as_it_was(word):
    for length in LENGTHS:
        codec, v = made(word), drawn(length)
        before = v.clone()
        payload, _ = codec.encode(v, codec.init(v))
        out = codec.decode(payload, torch.empty_like(v))
        assert out.shape == v.shape and out.dtype == v.dtype
        assert torch.equal(v, before)
        assert out.isfinite().all()


@pytest.mark.parametrize("word", WORDS)
def test_every_dtype_comes_back(word):
    for dtype in DTYPES:
        codec, v = made(word), drawn(700, dtype)
        payload, _ = codec.encode(v, codec.init(v))
        out = codec.decode(payload, torch.empty_like(v))
        assert out.dtype == dtype and out.isfinite().all()


@pytest.mark.parametrize("word", WORDS)
def test_a_vector_of_zeros_stays_one(word):
    codec, v = made(word), torch.zeros(1000)
    payload, _ = codec.encode(v, codec.init(v))
    assert not codec.decode(payload, torch.empty_like(v)).any()


@pytest.mark.parametrize("word", WORDS)
def test_what_is_not_finite_is_not_hidden(word):
    # of fp16, out of range becomes the largest half, as its docstring says
    bad = ("nan",) if word == "fp16" else ("nan", "inf", "-inf")
    for what, place in product(bad, (0, 700, 999)):
        codec, v = made(word), drawn(1000)
        v[place] = float(what)
        payload, _ = codec.encode(v, codec.init(v))
        assert not codec.decode(payload, torch.empty_like(v)).isfinite().all()


@pytest.mark.parametrize("word", WORDS)
def test_at_most_three_bodies_behind_a_header_and_at_most_a_little_longer_than_the_vector(word):
    codec, v = made(word), drawn(5000)
    payload, _ = codec.encode(v, codec.init(v))
    assert 1 <= len(payload) <= 4
    assert sum(part.nbytes for part in payload) <= 1.25 * v.nbytes + 256


@pytest.mark.parametrize("word", WORDS)
def test_the_same_state_gives_the_same_payload_also_from_a_copy(word):
    # as after a resume
    codec, v = made(word), drawn(3000)
    state = codec.init(v, seed=7)
    for seed in range(3):
        _, state = codec.encode(drawn(3000, seed=seed), state)
    saved = copy.deepcopy(state)
    first, after = codec.encode(v, state)
    second, after_copy = codec.encode(v, saved)
    assert same(first, second)
    assert after.keys() == after_copy.keys()
    assert all(torch.equal(after[name], after_copy[name]) for name in after)


@pytest.mark.parametrize("word", WORDS)
def test_what_a_payload_lacks_stays_in_the_rest(word):
    # in whole numbers and halves of small size, up to what float32 rounds off
    codec, rest = made(word), torch.zeros(3000)
    state, sent, given = codec.init(rest, seed=3), torch.zeros(3000), torch.zeros(3000)
    for step in range(5):
        v = drawn(3000, seed=step).mul(64).round()
        given += v
        payload, state = codec.encode_rest(v, rest, state)
        sent += codec.decode(payload, torch.empty_like(v))
    if any(name == "u" or "velocity" in name for name in state):
        pytest.skip("it sends velocities, which are more than what is given")
    assert torch.allclose(sent + rest, given, atol=2e-2)


@pytest.mark.parametrize("word", WORDS)
def test_feedback_is_one_of_those_that_there_are(word):
    assert CODECS.make(word).feedback in FEEDBACK


@pytest.mark.parametrize("word", WORDS)
def test_with_a_layout_it_comes_back_too(word):
    layout = Layout(("a.weight", "a.bias", "b.weight"), tuple(map(torch.Size, ((20, 30), (20,), (5, 20)))))
    v = drawn(layout.numel)
    for begin, end in ((0, 720), (0, 300), (610, 700)):
        codec = CODECS.make(word).fit(layout.pieces(begin, end))
        part = v[begin:end]
        payload, _ = codec.encode(part, codec.init(part))
        assert codec.decode(payload, torch.empty_like(part)).isfinite().all()
        average, _ = codec.merged.encode(part, codec.merged.init(part))
        assert codec.merged.decode(average, torch.empty_like(part)).isfinite().all()


# -- hostile payloads ------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_a_payload_of_another_length_is_refused(word):
    codec, v = made(word), drawn(1000)
    payload, _ = codec.encode(v, codec.init(v))
    for length in (0, 1, 999, 1001, 4000):
        with pytest.raises(WireError):
            codec.decode(payload, torch.empty(length))


@pytest.mark.parametrize("word", WORDS)
def test_a_payload_of_another_codec_is_refused(word):
    v = drawn(1000)
    for other in WORDS:
        if made(other).code != made(word).code:
            payload, _ = made(other).encode(v, made(other).init(v))
            with pytest.raises(WireError):
                made(word).decode(payload, torch.empty(1000))
