"""Selection: which elements of a vector are large enough to be sent.

NaN counts as infinite, so that it is sent and noticed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.dispatch import on_cpu

SAMPLE = 1 << 16  # elements that are sampled to estimate the rest


def how_many(density: float, elements: int) -> int:
    """The number of elements in that share of them; at least one if there are any."""
    return min(elements, max(1, round(density * elements)))


def sample(u: Tensor, add: Tensor | None = None) -> Tensor:
    """The magnitudes of a sample of `u`, or of `u + add`."""
    return (spread(u) if add is None else spread(u) + spread(add)).abs()


def spread(u: Tensor) -> Tensor:
    """A sample of `u`, at even distances."""
    return u[:: max(1, u.numel() // SAMPLE)]


def above(u: Tensor, tau: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rising positions where |u| > tau, and the elements there; first adds `add` to `u`.

    tau must be a number of the dtype of `u`.
    """
    if fit_kernel(u, add):
        from shoal.codecs.sparse import cpu

        return cpu.above(u, tau, add)
    if add is not None:
        u.add_(add)
    positions = (~(u.abs() <= tau)).nonzero().flatten()
    return positions, u[positions]


def largest(u: Tensor, k: int, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rising positions of the k largest |u|, and the elements there; first adds `add` to `u`.

    Of equal elements, those that come first; zeros never.
    """
    if k > 0 and fit_kernel(u, add):
        from shoal.codecs.sparse import cpu

        return cpu.largest(u, k, add, sample(u, add))
    if add is not None:
        u.add_(add)
    size = u.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    edge = size.kthvalue(len(size) - k + 1).values if k else size.new_tensor(torch.inf)
    chosen = size > edge
    chosen[(size == edge).nonzero().flatten()[: k - int(chosen.sum())]] = True
    positions = (chosen & (size > 0)).nonzero().flatten()
    return positions, u[positions]


def fit_kernel(*tensors: Tensor | None) -> bool:
    """Whether the CPU kernel can take these tensors."""
    return on_cpu(*(t for t in tensors if t is not None))
