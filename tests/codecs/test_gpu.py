"""Codecs on a GPU write the same bits as on the processor; the fused ones do not make it wait."""

import pytest
import torch

from sampling import sampled
from shoal.codecs import CODECS
from shoal.codecs.wire import seal
from shoal.core.errors import WireError
from shoal.core.vector import Layout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

WORDS = ["int8", "e3m0", "qsgd", "qsgd:norm=max,levels=7", "by_layer:large=int8,small=qsgd,bias=e3m0"]
SPARSE = ["random_k:density=0.01", "random_k:density=0.01,feedback=none", "threshold:tau=1.5"]
LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), tuple(map(torch.Size, ((100, 50), (100,), (9, 100)))))


@pytest.mark.parametrize(
    ("word", "dtype"), sampled([*WORDS, *SPARSE], [torch.float32, torch.float64, torch.float16])
)
def test_a_gpu_writes_the_same_bits(word, dtype):
    codec = CODECS.read(word).fit(LAYOUT.pieces(0, LAYOUT.numel))
    v = torch.randn(6000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rest = torch.randn(6000, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        u, left = v.to(device), rest.to(device, copy=True)
        state = codec.init(u, 3)
        first, state = codec.encode(u, state)
        second, state = codec.encode_rest(u, left, state)
        here = tuple(part.to(device) for part in second)
        results.append((*first, *second, codec.decode(here, torch.empty_like(u)), left))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs.cpu())


@pytest.mark.parametrize("word", [*WORDS, *SPARSE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(word, bad):
    codec = CODECS.read(word).fit(())
    v = torch.ones(6000, device="cuda")
    v[4000] = bad
    payload, _ = codec.encode(v, codec.init(v))
    here = tuple(part.cuda() for part in payload)
    assert not codec.decode(here, torch.empty_like(v)).isfinite().all()


# -- headers that are made and checked on the device -----------------------------------------------

FUSED = [
    "fp16",
    "bf16",
    "one_bit",
    "one_bit:column=4096",
    "ternary",
    "ternary:block=256",
    "ternary:block=8192",
]
LENGTHS = [1, 2, 3, 4, 5, 511, 513, 2047, 2048, 2049, 4099, 8192, 100_003, 3_000_000]


def written(word, length):
    codec = CODECS.read(word).fit(())
    v = torch.randn(length, generator=torch.Generator().manual_seed(length)).cuda()
    payload, _ = codec.encode(v, codec.init(v))
    return codec, payload


@pytest.mark.parametrize(("word", "length"), sampled(FUSED, LENGTHS))
def test_a_header_that_a_gpu_made_is_that_of_the_processor(word, length):
    codec, (header, *bodies) = written(word, length)
    count = int(header.view(torch.int64)[2])
    same, *_ = seal(codec.code, length, count, *(body.cpu() for body in bodies))
    assert header.is_cuda and torch.equal(header.cpu(), same)
    assert torch.equal(seal(codec.code, length, count, *bodies)[0].cpu(), same)


@pytest.mark.parametrize("word", FUSED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_with_a_header_that_is_right(word, bad):
    codec, v = CODECS.read(word).fit(()), torch.randn(5000).cuda()
    v[4990] = bad  # in a block that is not full
    (header, *bodies), _ = codec.encode(v, codec.init(v))
    count = int(header.view(torch.int64)[2])
    assert torch.equal(header.cpu(), seal(codec.code, 5000, count, *(body.cpu() for body in bodies))[0])


@pytest.mark.parametrize(("word", "length"), sampled([*FUSED, "int8"], [1, 2, 3, 2049, 100_003]))
def test_what_was_damaged_on_the_way_to_a_gpu_is_refused(word, length):
    codec, payload = written(word, length)
    for number, part in enumerate(payload):
        for place in {0, part.nbytes // 2, part.nbytes - 1}:
            damaged = [other.clone() for other in payload]
            damaged[number].view(torch.uint8)[place] ^= 16
            with pytest.raises(WireError):
                codec.decode(tuple(damaged), torch.empty(length, device="cuda"))
    with pytest.raises(WireError):
        codec.decode(payload, torch.empty(length + 1, device="cuda"))


def test_a_gpu_refuses_counts_and_scales_that_none_has():
    codec, (_, codes, scales) = written("ternary", 5000)
    for count, *bodies in ((2, codes, scales), (3, codes, -scales)):
        with pytest.raises(WireError):
            codec.decode(seal(codec.code, 5000, count, *bodies), torch.empty(5000, device="cuda"))


@pytest.mark.parametrize("word", FUSED)
def test_the_processor_does_not_wait_for_a_gpu_that_writes(word):
    codec, v = CODECS.read(word).fit(()), torch.ones(100_003, device="cuda")
    rest, state = torch.zeros_like(v), codec.init(v)
    codec.encode(v, state)  # compiles
    codec.encode_rest(v, rest.clone(), state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(v, state)
        if word not in ("fp16", "bf16"):  # which have no rest of their own: the base class decodes
            codec.encode_rest(v, rest, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("word", FUSED)
def test_what_was_changed_where_it_lies_is_checked_again(word):
    codec, payload = written(word, 5000)
    out = torch.empty(5000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.decode(payload, out)  # the very tensors that were written: nothing to wait for
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(WireError):
        codec.decode((*payload[:-1], payload[-1].clone().add_(1)), out)
    payload[-1].add_(1)
    with pytest.raises(WireError):
        codec.decode(payload, out)


@pytest.mark.parametrize("word", ["fp16", "bf16"])
def test_a_gpu_rounds_to_the_halves_of_torch(word):
    chance = torch.Generator().manual_seed(0)
    v = torch.randn(100_003, generator=chance) * 10 ** (8 * torch.randn(100_003, generator=chance))
    v[:8] = torch.tensor([float("nan"), float("inf"), -float("inf"), 65519.9, 65520.0, -1e9, 1e-45, -0.0])
    codec = CODECS.make(word)
    (_, there), _ = codec.encode(v.cuda(), {})
    plain = v.clamp(-65504, 65504).half() if word == "fp16" else v.bfloat16()
    number = ~v.isnan()
    assert torch.equal(there.cpu().view(torch.int16)[number], plain.view(torch.int16)[number])
    out = codec.decode(codec.encode(v.cuda(), {})[0], torch.empty(100_003, device="cuda"))
    assert torch.equal(out.cpu()[number], plain.float()[number]) and out[0].isnan()
