"""The demo's task: digits that are drawn in code, and an MLP that learns to read them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.seeds import stream
from shoal.core.task import Data, Task

GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
SIDE, DOT = 28, 3  # pixels of a picture, and of a glyph's dot, each way
TURN, STRETCH, SHIFT = math.radians(20), 0.25, 0.2  # how far a digit is turned, stretched and moved at most
BATCH = 64


def drawings(
    width: int,
    lr: float,
    samples: int = 32_000,
    tests: int = 2_000,
    noise: float = 0.3,
    fresh: bool = False,
) -> Task:
    """An MLP with two hidden layers of `width` units reads digits; the test set is never trained on.

    `noise` is a standard deviation, where ink is 1 and paper 0. With `fresh` noise a picture looks different
    whenever it is learnt from, so that learning takes longer and nothing is learnt by heart.
    """
    return Task(
        "drawings",
        partial(reader, width),
        partial(draw_data, samples, tests, 0.0 if fresh else noise, noise),
        lr=lr,
        batch=BATCH,
        augment=partial(add_noise, noise) if fresh else None,
        about="digits drawn in code, 28 x 28, turned, stretched, moved and noisy",
    )


def reader(width: int) -> nn.Module:
    """784-width-width-10 with ReLU."""
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def draw_data(samples: int, tests: int, noise: float, test_noise: float) -> Data:
    """The same pictures in every process."""
    random = stream(0, "drawings")
    y = torch.randint(10, (samples + tests,), generator=random)
    x = _draw(y, random)
    parts = ((x[:samples], noise), (x[samples:], test_noise))
    train, test = (part + level * torch.randn(part.shape, generator=random) for part, level in parts)
    return Data(train, y[:samples], test, y[samples:])


def add_noise(noise: float, x: Tensor) -> Tensor:
    """The pictures with noise of that standard deviation."""
    return x + noise * torch.randn_like(x)


def _draw(y: Tensor, random: torch.Generator) -> Tensor:
    """A picture of each digit: its glyph, turned, stretched and moved."""
    turn, wide, high, across, down = (2 * torch.rand(len(y), 5, generator=random) - 1).T
    cos, sin = (TURN * turn).cos(), (TURN * turn).sin()
    first = torch.stack([cos * (1 + STRETCH * wide), -sin, SHIFT * across], 1)
    second = torch.stack([sin, cos * (1 + STRETCH * high), SHIFT * down], 1)
    grid = F.affine_grid(torch.stack([first, second], 1), [len(y), 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(_ink()[y], grid, align_corners=False).flatten(1)


def _ink() -> Tensor:
    """The ten glyphs in the middle of a picture each."""
    dots = torch.tensor([[[float(dot) for dot in row] for row in glyph.split()] for glyph in GLYPHS])
    ink = F.interpolate(dots[:, None], scale_factor=DOT)
    high, wide = SIDE - ink.shape[2], SIDE - ink.shape[3]
    return F.pad(ink, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
