"""Deep gradient compression: the largest sums of local momentum (Lin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codecs.momentum import pushed
from shoal.codecs.pairs import Pairs, seal_pairs
from shoal.codecs.selection import check_density, how_many
from shoal.codecs.sparse import Sparse
from shoal.core.codec import Codec, Payload, State

VELOCITY, WAITING, STEP = "velocity", "waiting", "step"  # u and v of the paper, and how many were encoded
STAGES = 4  # of the warm-up: 25, 6.25, 1.56 and 0.39 percent travel


@dataclass(frozen=True)
class DGC(Pairs):
    """Adds gradients up with momentum at the sender, and sends the largest of the sums that wait there.

    What has been sent starts anew, and with masking its momentum too. The momentum is here: whoever receives
    takes plain steps. Clipping holds for each vector that is encoded; if N senders share a limit, each has
    limit / sqrt(N).
    """

    code: ClassVar[int] = 12
    for_gradients: ClassVar[bool] = True

    density: float = 0.001  # the share of the elements that travels
    momentum: float = 0.9
    clip: float | None = None  # the longest that a gradient may be
    warmup: int = 0  # vectors in each stage of the warm-up, in which more travels
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
        velocity, waiting = state[VELOCITY], state[WAITING]  # changed in place: each is as long as the model
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


def clipped(g: Tensor, longest: float) -> Tensor:
    """The gradient, or as much of it as is `longest`; not a number if its length is none."""
    length = float(torch.linalg.vector_norm(g, dtype=torch.float64))  # in which no square is too large
    return g if length <= longest else g * (longest / length)
