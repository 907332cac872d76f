"""Deep gradient compression: the largest accumulated velocities (Lin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.sparse.codec import Pairs, Sparse, seal_pairs
from shoal.codecs.sparse.selection import fit_kernel, how_many, largest, spread
from shoal.core.codec import Codec, Payload, State
from shoal.core.limits import check_density

VELOCITY, WAITING, STEP = "velocity", "waiting", "step"  # u and v of the paper, and the vectors encoded
STAGES = 4  # of the warm-up, which send 25, 6.25, 1.56 and 0.39 percent
FEWER = 4  # of three vectors, sample fewer elements: each is a cache miss of its own


@dataclass(frozen=True)
class DGC(Pairs):
    """Accumulates gradients with momentum at the sender, and sends the largest of the accumulated elements.

    An element that was sent starts again from 0; with masking, so does its momentum. Momentum is applied
    here: the receiver takes plain steps. Each encoded vector is clipped by itself; for a common limit of N
    senders, give each limit / sqrt(N).
    """

    code: ClassVar[int] = 12
    for_gradients: ClassVar[bool] = True

    density: float = 0.001  # the share of the elements that is sent
    momentum: float = 0.9
    clip: float | None = None  # the largest norm of a gradient
    warmup: int = 0  # vectors in each stage of the warm-up, which sends more
    masking: bool = True
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} should be at least 0 and below 1, as 0.9")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} should be above 0, or none for gradients of any length")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} should be a number of steps, or 0 for no warm-up")

    @property
    def merged(self) -> Codec:
        return Sparse()

    @property
    def share(self) -> float:
        return self.density

    def init(self, like: Tensor, seed: int = 0) -> State:
        return {VELOCITY: torch.zeros_like(like), WAITING: torch.zeros_like(like), STEP: torch.tensor(0)}

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        velocity, waiting = state[VELOCITY], state[WAITING]  # changed in place: as large as the model
        g = v if self.clip is None else clipped(v, self.clip)
        k = how_many(self._density(int(state[STEP])), v.numel())
        positions, values = pushed(waiting, velocity, g, self.momentum, self.nesterov, k)
        for vector in (waiting, velocity) if self.masking else (waiting,):
            vector.index_fill_(0, positions, 0)
        state = {**state, STEP: state[STEP] + 1}
        return seal_pairs(self.code, v.numel(), positions, values), state

    def _density(self, step: int) -> float:
        stage = step // self.warmup if self.warmup else STAGES
        return self.density if stage >= STAGES else max(self.density, 0.25 ** (stage + 1))


def pushed(
    waiting: Tensor, velocity: Tensor, g: Tensor, momentum: float, nesterov: bool, k: int
) -> tuple[Tensor, Tensor]:
    """Push the velocity u with a gradient, add it to the waiting v, and find the k `largest` of v.

    u = m u + g and v = v + u; with Nesterov's momentum u = m (u + g) and v = v + u + g.
    """
    if k > 0 and fit_kernel(waiting, velocity, g):
        import numpy as np

        from shoal.codecs.sparse import cpu

        few = [spread(t)[::FEWER] for t in (waiting, velocity, g)]
        some = few[0].clone()
        _push(some, few[1].clone(), few[2], momentum, nesterov)
        return cpu.largest(waiting, k, g, some.abs(), velocity, (np.float32(momentum), nesterov))
    _push(waiting, velocity, g, momentum, nesterov)
    return largest(waiting, k)


def _push(waiting: Tensor, velocity: Tensor, g: Tensor, momentum: float, nesterov: bool) -> None:
    if nesterov:
        waiting.add_(velocity.add_(g).mul_(momentum)).add_(g)
    else:
        waiting.add_(velocity.mul_(momentum).add_(g))


def clipped(g: Tensor, longest: float) -> Tensor:
    """The gradient, scaled down to norm `longest` if it is longer; NaN if the norm is NaN."""
    length = float(torch.linalg.vector_norm(g, dtype=torch.float64))  # in which no square overflows
    return g if length <= longest else g * (longest / length)
