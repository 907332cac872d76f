"""A codec for each layer: who gets which, that each does what it does alone, and that nothing is lost."""

import copy

import pytest
import torch

from shoal.codecs import CODECS
from shoal.codecs.by_layer import ByLayer, ByLength, Layered, LayerGroup, join, split
from shoal.codecs.halves.codec import FP16
from shoal.codecs.int8.codec import Int8
from shoal.codecs.qsgd.codec import QSGD
from shoal.codecs.sparse.top_k import TopK
from shoal.codecs.wire import HEADER, seal
from shoal.core.codec import Identity
from shoal.core.errors import WireError
from shoal.core.transport import DTYPES
from shoal.core.vector import Layout
from shoal.strategies import CHOCO, Sync, SyncServer
from shoal.testing.problems import Problem, simulate

LAYOUT = Layout(
    ("a.weight", "a.bias", "b.weight", "b.bias"),
    tuple(map(torch.Size, ((100, 50), (100,), (10, 100), (10,)))),
)
WHOLE = LAYOUT.pieces(0, LAYOUT.numel)  # 5000, 100, 1000 and 10 elements
CHOICE = ByLayer(large="int8:block=64", small="fp16")


def drawn(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def round_trip(v, codec):
    payload, _ = codec.encode(v, codec.init(v))
    return codec.decode(payload, torch.full_like(v, 7))


# -- who gets which --------------------------------------------------------------------------------


def test_a_parameter_is_large_small_or_a_bias():
    assert CHOICE.fit(WHOLE) == Layered(
        (
            LayerGroup(Int8(block=64), ((0, 5000),)),
            LayerGroup(Identity(), ((5000, 5100), (6100, 6110))),
            LayerGroup(FP16(), ((5100, 6100),)),
        )
    )


def test_where_all_have_the_same_codec_all_is_one_vector_to_it():
    codec, v = ByLayer(large="int8", small="int8", bias="int8").fit(WHOLE), drawn(6110)
    assert torch.equal(round_trip(v, codec), round_trip(v, Int8()))
    assert CHOICE.fit(LAYOUT.pieces(20, 40)).groups == (LayerGroup(Int8(block=64), ((0, 20),)),)


def test_the_size_is_that_of_the_whole_parameter_however_little_lies_there():
    groups = CHOICE.fit(LAYOUT.pieces(4990, 5105)).groups
    assert groups == (
        LayerGroup(Int8(block=64), ((0, 10),)),
        LayerGroup(Identity(), ((10, 110),)),
        LayerGroup(FP16(), ((110, 115),)),
    )
    assert ByLayer(large="int8", small="fp16", limit=5000).fit(WHOLE).groups[0].codec == Int8()
    assert ByLayer(large="int8", small="fp16", limit=5001).fit(WHOLE).groups[0].codec == FP16()


def test_a_rule_in_python_may_choose():
    by_name = ByLayer(
        large="int8", rule=lambda piece: "fp16" if piece.name.startswith("b") else QSGD(levels=3)
    )
    assert by_name.fit(WHOLE).groups == (
        LayerGroup(QSGD(levels=3), ((0, 5100),)),
        LayerGroup(FP16(), ((5100, 6110),)),
    )
    by_kind = ByLayer(large="int8", rule=lambda piece: {"matrix": "int8"}.get(piece.kind, "none"))
    assert [group.codec for group in by_kind.fit(WHOLE).groups] == [Int8(), Identity()]


def test_a_codec_hears_of_its_own_pieces_where_they_lie_in_its_vector():
    class Nosy(Int8):
        def fit(self, pieces):
            heard.append([(piece.name, piece.begin, piece.end) for piece in pieces])
            return self

    heard = []
    ByLayer(large="int8", rule=lambda piece: Nosy() if "weight" in piece.name else "none").fit(WHOLE)
    assert heard == [[("a.weight", 0, 5000), ("b.weight", 5000, 6000)]]


def test_without_layers_the_length_of_the_vector_decides():
    assert CHOICE.fit(()) == ByLength(Int8(block=64), FP16(), 4096)
    for n, codec in ((4096, Int8(block=64)), (4095, FP16())):
        v = drawn(n)
        assert torch.equal(round_trip(v, CHOICE), round_trip(v, codec))
        assert torch.equal(round_trip(v, CHOICE.fit(())), round_trip(v, codec))


def test_words_have_options_of_their_own():
    read = ByLayer(large="top_k:density=0.5/feedback=none", small="fp16")
    assert read.fit(WHOLE).groups[0].codec == TopK(density=0.5, feedback="none")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"large": "int9"}, "unknown codec 'int9'. Did you mean 'int8'"),
        ({"large": "int8", "small": "int8:blocks=3"}, "has no option 'blocks'"),
        ({"large": "int8", "bias": "int8:block=0"}, "block=0 should be from 1"),
        ({"large": "int8", "rule": "large"}, "rule='large' is not a function"),
        ({"large": "dgc"}, "cannot do that for some layers only; take it for the whole model"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options, told):
    with pytest.raises(ValueError, match=told):
        ByLayer(**options)


# -- each does what it does alone ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_each_group_arrives_as_by_its_own_codec(dtype):
    v = drawn(6110).to(dtype)
    before = v.clone()
    got = round_trip(v, CHOICE.fit(WHOLE))
    assert torch.equal(v, before) and got.dtype == dtype
    assert torch.equal(got[:5000], round_trip(v[:5000], Int8(block=64)))
    assert torch.equal(got[5000:5100], v[5000:5100]) and torch.equal(got[6100:], v[6100:])
    assert torch.equal(got[5100:6100], round_trip(v[5100:6100], FP16()))


def test_stretches_with_one_codec_are_one_vector_to_it():
    codec = ByLayer(large="int8", small="int8", bias="none").fit(WHOLE)
    v = drawn(6110)
    weights = round_trip(torch.cat([v[:5000], v[5100:6100]]), Int8())
    got = round_trip(v, codec)
    assert torch.equal(torch.cat([got[:5000], got[5100:6100]]), weights)


def test_bytes_by_a_formula():
    v = drawn(6110)
    header, table, written = CHOICE.fit(WHOLE).encode(v, {})[0]
    assert header.nbytes == HEADER.size == 32 and table.nbytes == 3 * 4 * 16
    of_int8 = 32 + 5000 + 4 * 80  # 5000 is a multiple of 8, and 79 scales are filled up to 80
    assert written.nbytes == of_int8 + 4 * 110 + (32 + 2 * 1000)


def test_each_group_has_draws_of_its_own_and_a_copy_of_its_state_goes_on_alike():
    codec = ByLayer(large="qsgd", small="qsgd:levels=3", bias="int8:feedback=residual").fit(WHOLE)
    v, rest = drawn(6110), torch.zeros(6110)
    state = codec.init(v, seed=5)
    assert state.keys() == {"0.seed", "0.counter", "2.seed", "2.counter"}
    assert state["0.seed"] != state["2.seed"]
    _, state = codec.encode_rest(v, rest, state)
    saved, kept = copy.deepcopy(state), rest.clone()
    first, after = codec.encode_rest(v, rest, state)
    second, after_copy = codec.encode_rest(v, kept, saved)
    assert all(map(torch.equal, first, second)) and torch.equal(rest, kept)
    assert all(torch.equal(after[name], after_copy[name]) for name in after)


# -- feedback --------------------------------------------------------------------------------------


def test_each_group_keeps_what_its_own_payloads_lack():
    # in whole numbers, so that no sum is rounded; the codec of the second group loses what it lacks
    codec = ByLayer(large="top_k:density=0.1", small="top_k:density=0.3/feedback=none").fit(WHOLE)
    assert codec.feedback == "residual"
    given, sent, rest = torch.zeros(6110), torch.zeros(6110), torch.zeros(6110)
    for step in range(5):
        v = drawn(6110, seed=step).mul(8).round()
        given += v
        payload, _ = codec.encode_rest(v, rest, {})
        sent += codec.decode(payload, torch.empty(6110))
    assert torch.equal((sent + rest)[:5100], given[:5100]) and rest[:5000].any()
    assert not rest[5000:].any() and not torch.equal(sent[5100:6100], given[5100:6100])


def test_stretches_of_one_codec_keep_what_it_lacks_where_they_lie():
    codec = ByLayer(large="int8:feedback=residual", small="int8:feedback=residual").fit(WHOLE)
    v, rest, together = drawn(6110), torch.zeros(6110), torch.zeros(6000)
    for _ in range(2):
        codec.encode_rest(v, rest, {})
        Int8().encode_rest(torch.cat([v[:5000], v[5100:6100]]), together, {})
    assert torch.equal(rest[:5000], together[:5000]) and torch.equal(rest[5100:6100], together[5000:])


def test_who_sees_to_feedback_itself_gets_none():
    codec = ByLayer(large="int8:feedback=double").fit(WHOLE)
    v = drawn(6110)
    first, state = codec.encode(v, codec.init(v))
    second, state = codec.encode(v, state)
    assert all(map(torch.equal, first, second)) and not state


def test_whoever_merges_keeps_what_codecs_with_feedback_lack_too():
    codec = ByLayer(large="int8:feedback=residual", small="int8:block=8").fit(WHOLE)
    v = drawn(6110)
    for end in (codec, codec.merged, codec.merged.merged):
        rest = torch.zeros(6110)
        payload, _ = end.encode_rest(v, rest, end.init(v))
        lacks = v - end.decode(payload, torch.empty(6110))
        assert end.feedback == "residual"
        assert torch.equal(rest[:5000], lacks[:5000]) and lacks[:5000].any()
        assert not rest[5000:].any() and lacks[5100:6100].any()


def test_whoever_merges_writes_what_each_codec_would_have_merged():
    merged = ByLayer(large="top_k", small="fp16").fit(WHOLE).merged
    assert [group.codec for group in merged.groups] == [TopK().merged, Identity(), FP16()]
    v = drawn(6110)
    assert torch.equal(round_trip(v, merged)[:5000], v[:5000])  # a union is sent on as it is
    assert ByLayer(large="int8").merged == ByLayer(large="int8").fit(()).merged


def test_without_layers_feedback_is_the_same():
    codec = ByLayer(large="int8:feedback=residual")
    v = drawn(5000)
    for end in (codec, codec.fit(()), codec.merged):
        rest = torch.zeros(5000)
        end.encode_rest(v, rest, {})
        assert end.feedback == "residual" and rest.any()
    assert ByLayer(large="int8").feedback == "none"


class Drawn(Problem):
    """A gradient that depends on everything."""

    def gradient(self, rank, step, x):
        return x * (1 + rank) + drawn(x.numel(), seed=97 * step + rank).double()


@pytest.mark.parametrize("strategy", [Sync(), SyncServer()], ids=["sync", "sync_server"])
def test_four_workers_with_codecs_that_lose_nothing_are_dense_sync_bit_for_bit(strategy):
    layout = Layout(("a.weight", "a.bias", "b.weight"), tuple(map(torch.Size, ((5, 4), (5,), (1, 5)))))
    codec = ByLayer(large="top_k:density=1", limit=8, small="sparse")
    dense, coded = (
        simulate(
            strategy,
            Drawn(lr=0.1, momentum=0.9),
            workers=4,
            steps=5,
            start=[0.3, -0.7, 0.1] * 10,
            layout=layout,
            **options,
        )
        for options in ({}, {"codec": codec})
    )
    for k in range(4):
        assert torch.equal(coded.worker(k).x, dense.worker(k).x)


def test_choco_sees_to_feedback_itself():
    runs = [
        simulate(
            CHOCO(),
            Drawn(lr=0.1),
            workers=3,
            steps=5,
            start=[0.3, -0.7, 0.1] * 10,
            codec=ByLayer(large=f"int8:feedback={feedback}", limit=1),
        )
        for feedback in ("none", "double")
    ]
    assert all(torch.equal(runs[0].worker(k).x, runs[1].worker(k).x) for k in range(3))


# -- hostile payloads ------------------------------------------------------------------------------


def test_tensors_of_every_dtype_come_back():
    payloads = [
        tuple(torch.arange(5).to(dtype) for dtype in DTYPES[i : i + 3]) for i in range(0, len(DTYPES), 3)
    ]
    payloads += [(), (torch.empty(0), torch.empty(0, dtype=torch.int64))]
    table, written = join(payloads, torch.device("cpu"))
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), written])[1:]  # as a frame may have it
    for got in (split(table, written), split(table, odd)):
        for mine, theirs in zip(got, payloads, strict=True):
            assert [t.dtype for t in mine] == [t.dtype for t in theirs]
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1),  # no header, but something behind it
        (0, -2),
        (0, len(DTYPES)),
        (0, 5),  # 32 x int64 is more
        (1, -1),
        (1, 2**62),
        (1, 31),
        (1, 40),
        (3, 4999),
        (3, 5001),
        (2, 6),  # uint8, where int8 belongs
        (6, 0),  # a fourth tensor of none
        (7, 5),
        (8, -1),
        (9, 111),
    ],
)
def test_a_table_that_says_something_else_is_refused(place, value):
    codec = CHOICE.fit(WHOLE)
    (_, table, written), _ = codec.encode(drawn(6110), {})
    assert table[:10].tolist() == [6, 32, 7, 5000, 0, 79, -1, 0, 0, 110]
    codec.decode(seal(15, 6110, written.numel(), table, written), torch.empty(6110))
    table[place] = value
    with pytest.raises(WireError):
        codec.decode(seal(15, 6110, written.numel(), table, written), torch.empty(6110))


def test_bodies_that_do_not_fit_are_refused():
    codec = CHOICE.fit(WHOLE)
    (_, table, written), _ = codec.encode(drawn(6110), {})
    n = written.numel()
    inner = written.clone()
    inner[40] ^= 1  # which the checksum of the payload inside shows
    for count, bodies in (
        (n, (table[:-1], written)),
        (n, (table.int(), written)),
        (n, (table,)),
        (n, (table, written, written)),
        (n - 8, (table, written[:-8])),
        (n + 8, (table, torch.cat([written, written[:8]]))),
        (n, (table, written[:-8])),
        (2**62, (table, written)),
        (n, (table, inner)),
        (n, (table.roll(8), written)),
    ):
        with pytest.raises(WireError):
            codec.decode(seal(15, 6110, count, *bodies), torch.empty(6110))
    with pytest.raises(WireError):
        codec.decode(codec.encode(drawn(6110), {})[0], torch.empty(6111))


def test_it_is_a_word_of_the_command_line():
    codec = CODECS.read("by_layer:large=top_k:density=0.01/feedback=none,small=fp16,limit=10")
    assert codec == ByLayer(large="top_k:density=0.01/feedback=none", small="fp16", limit=10)
    assert CODECS.read(CODECS.text_of(codec)) == codec
