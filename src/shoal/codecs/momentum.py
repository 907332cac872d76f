"""Momentum where gradients are made: they push a velocity, which is added up; the largest sums are found."""

from __future__ import annotations

from torch import Tensor

from shoal.codecs.selection import fit_kernel, largest, spread

FEWER = 4  # of three vectors, fewer elements are looked at: each is a place in memory of its own


def pushed(
    waiting: Tensor, velocity: Tensor, g: Tensor, momentum: float, nesterov: bool, k: int
) -> tuple[Tensor, Tensor]:
    """Let a gradient change the velocity u, add that to what waits, v, and find the k `largest` of it.

    u = m u + g and v = v + u; with Nesterov's momentum u = m (u + g) and v = v + u + g.
    """
    if k > 0 and fit_kernel(waiting, velocity, g):
        import numpy as np

        from shoal.codecs.kernels import selection as kernel

        few = [spread(t)[::FEWER] for t in (waiting, velocity, g)]
        some = few[0].clone()
        _push(some, few[1].clone(), few[2], momentum, nesterov)
        return kernel.largest(waiting, k, g, some.abs(), velocity, (np.float32(momentum), nesterov))
    _push(waiting, velocity, g, momentum, nesterov)
    return largest(waiting, k)


def _push(waiting: Tensor, velocity: Tensor, g: Tensor, momentum: float, nesterov: bool) -> None:
    if nesterov:
        waiting.add_(velocity.add_(g).mul_(momentum)).add_(g)
    else:
        waiting.add_(velocity.mul_(momentum).add_(g))
