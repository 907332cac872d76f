"""Draws: uniform numbers out of a seed and a counter (SplitMix64, Steele, Lea & Flood 2014).

The state of a codec that rounds at random is these two numbers, so a stream goes on from a checkpoint with
the bits that it would have drawn anyway. Each word of 64 bits makes two draws, its lower half the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.codec import State

SEED, COUNTER = "seed", "counter"
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STEP = 2.0**-24  # of the numbers drawn: as fine as float32 has them below 1


def start(seed: int) -> State:
    """The state before the first draw."""
    return {SEED: torch.tensor(seed), COUNTER: torch.tensor(0)}


def after(state: State, n: int) -> State:
    """The state once `n` numbers have been drawn; a last half word is not kept."""
    return {**state, COUNTER: state[COUNTER] + (n + 1) // 2}


def first(state: State) -> int:
    """What the next word is mixed from; each word after it from GAMMA more. As a signed number."""
    return _signed((int(state[SEED]) + (int(state[COUNTER]) + 1) * GAMMA) % (1 << 64))


def uniform(state: State, n: int, device: torch.device | None = None) -> Tensor:
    """The next `n` numbers in [0, 1), in float32. Ask `after` for the state behind them."""
    words = torch.arange((n + 1) // 2, device=device) * _signed(GAMMA) + first(state)
    # integers of torch wrap around, as they should here
    words = (words ^ _shifted(words, 30)) * _signed(FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(SECOND)
    words = words ^ _shifted(words, 31)
    return (_shifted(words.view(torch.int32), 8)[:n]).float() * STEP


def _shifted(words: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in; torch would bring in the sign."""
    bits = 8 * words.element_size()
    return (words >> by) & ((1 << (bits - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
