"""Draws: uniform random numbers from a seed and a counter (SplitMix64, Steele, Lea & Flood 2014).

The state of a codec that rounds at random is these two numbers, so a run resumed from a checkpoint draws what
the original would have drawn. Each word of 64 bits makes two draws, the lower half first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.codec import State

SEED, COUNTER = "seed", "counter"
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STEP = 2.0**-24  # between neighbouring draws: the resolution of float32 just below 1


def start(seed: int) -> State:
    """The state before the first draw."""
    return {SEED: torch.tensor(seed), COUNTER: torch.tensor(0)}


def after(state: State, n: int) -> State:
    """The state once `n` numbers have been drawn; an unused half word is dropped."""
    return {**state, COUNTER: state[COUNTER] + (n + 1) // 2}


def first(state: State) -> int:
    """The number that the next word is mixed from, as a signed integer; each later word adds GAMMA."""
    return _signed((int(state[SEED]) + (int(state[COUNTER]) + 1) * GAMMA) % (1 << 64))


def uniform(state: State, n: int, device: torch.device | None = None) -> Tensor:
    """The next `n` numbers in [0, 1), in float32. `after` gives the state that follows."""
    words = torch.arange((n + 1) // 2, device=device) * _signed(GAMMA) + first(state)
    # torch's integers wrap around, as SplitMix64 needs
    words = (words ^ _shifted(words, 30)) * _signed(FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(SECOND)
    words = words ^ _shifted(words, 31)
    return (_shifted(words.view(torch.int32), 8)[:n]).float() * STEP


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch would fill with the sign."""
    bits = 8 * words.element_size()
    return (words >> by) & ((1 << (bits - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
