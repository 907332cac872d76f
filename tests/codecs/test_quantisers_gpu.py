"""The codecs that round: on a GPU they write the same bits as on the processor."""

import pytest
import torch

from shoal.codecs import CODECS
from shoal.core.vector import Layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WORDS = ["int8", "e3m0", "qsgd", "qsgd:norm=max,levels=7", "by_layer:large=int8,small=qsgd,bias=e3m0"]
LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), tuple(map(torch.Size, ((100, 50), (100,), (9, 100)))))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
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


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(word, bad):
    codec = CODECS.read(word).fit(())
    v = torch.ones(6000, device="cuda")
    v[4000] = bad
    payload, _ = codec.encode(v, codec.init(v))
    here = tuple(part.cuda() for part in payload)
    assert not codec.decode(here, torch.empty_like(v)).isfinite().all()
