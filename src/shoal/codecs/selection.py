"""Selection: which elements of a vector are large enough to travel.

What is not a number counts as infinite, so that it travels and shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.kernels import on_cpu
from shoal.core.limits import check_density as check_density

SAMPLE = 1 << 16  # elements that are looked at to guess what the others are like


def how_many(density: float, elements: int) -> int:
    """That share of so many elements, at least one if there are any."""
    return min(elements, max(1, round(density * elements)))


def sample(u: Tensor, add: Tensor | None = None) -> Tensor:
    """Magnitudes of some elements of `u`, or of `u + add`."""
    return (spread(u) if add is None else spread(u) + spread(add)).abs()


def spread(u: Tensor) -> Tensor:
    """Some elements of `u`, at even distances."""
    return u[:: max(1, u.numel() // SAMPLE)]


def above(u: Tensor, tau: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The positions, rising, where |u| > tau, and the elements there; first adds `add` to `u`.

    The dtype has to hold tau itself.
    """
    if fit_kernel(u, add):
        from shoal.codecs.kernels import selection as kernel

        return kernel.above(u, tau, add)
    if add is not None:
        u.add_(add)
    positions = (~(u.abs() <= tau)).nonzero().flatten()
    return positions, u[positions]


def largest(u: Tensor, k: int, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The positions, rising, of the k largest |u| that are not 0, and they; first adds `add` to `u`.

    Of equal ones, those that come first.
    """
    if k > 0 and fit_kernel(u, add):
        from shoal.codecs.kernels import selection as kernel

        return kernel.largest(u, k, add, sample(u, add))
    if add is not None:
        u.add_(add)
    size = u.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    edge = size.kthvalue(len(size) - k + 1).values if k else size.new_tensor(torch.inf)
    chosen = size > edge
    chosen[(size == edge).nonzero().flatten()[: k - int(chosen.sum())]] = True
    positions = (chosen & (size > 0)).nonzero().flatten()
    return positions, u[positions]


def fit_kernel(*tensors: Tensor | None) -> bool:
    """Whether these can be given to the kernel."""
    return on_cpu(*(t for t in tensors if t is not None))
