"""Bits: integers of any width without gaps between them, in bytes, the lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.kernels.dispatch import on_cpu

MANY = 1 << 12  # integers from which on a kernel is worth the half second that Numba loads


def bytes_of(elements: int, bits: int) -> int:
    """How many bytes so many integers take."""
    return -(-elements * bits // 8)


def to_bytes(numbers: Tensor, bits: int) -> Tensor:
    """Integers of so many bits, in uint8."""
    if _has_kernel(numbers, numbers.numel(), bits):
        from shoal.chunks import bits_cpu

        return bits_cpu.to_bytes(numbers, bits, bytes_of(numbers.numel(), bits))
    places = torch.arange(bits, device=numbers.device)
    each = ((numbers.reshape(-1, 1) >> places) & 1).flatten()
    rows = pad(each, (0, -len(each) % 8)).view(-1, 8)
    return (rows << torch.arange(8, device=numbers.device)).sum(1).to(torch.uint8)


def from_bytes(packed: Tensor, bits: int, elements: int) -> Tensor:
    """The integers in these bytes, in int64."""
    if _has_kernel(packed, elements, bits):
        from shoal.chunks import bits_cpu

        return bits_cpu.from_bytes(packed, bits, elements)
    places = torch.arange(8, device=packed.device)
    each = ((packed.long().view(-1, 1) >> places) & 1).flatten()[: elements * bits]
    numbers: Tensor = (each.view(-1, bits) << torch.arange(bits, device=packed.device)).sum(1)
    return numbers


def _has_kernel(tensor: Tensor, elements: int, bits: int) -> bool:
    return elements >= MANY and bits <= 32 and tensor.device.type == "cpu" and on_cpu()
