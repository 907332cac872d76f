"""What the small scripts share: a little data, and printing tensors to the last bit."""

import torch
from torch import Tensor


def say(word: str, *tensors: Tensor) -> None:
    flat = torch.cat([t.detach().float().reshape(-1) for t in tensors])
    print(f"{word} {flat.numpy().tobytes().hex()}")


def points(samples: int = 256) -> tuple[Tensor, Tensor]:
    """Points of eight numbers, and to which of three classes each belongs."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=draw)
    return x, (x @ torch.randn(8, 3, generator=draw)).argmax(1)


def words(samples: int = 256) -> tuple[Tensor, Tensor]:
    """A word of twelve, and the one that follows it: mostly the next."""
    draw = torch.Generator().manual_seed(1)
    now = torch.randint(12, (samples,), generator=draw)
    return now, (now + (torch.rand(samples, generator=draw) < 0.9)) % 12
