"""The whole model again: put together from what each process of a group holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.vector import Layout
from shoal.layouts.group_part import HeldPiece


def assembled(whole: Layout, parts: Sequence[tuple[Sequence[HeldPiece], Tensor]]) -> Tensor:
    """The vector of the whole model, from the pieces and vectors of all processes in their order.

    What several processes hold is the first one's. Raises ValueError if something is missing.
    """
    found: dict[str, list[tuple[HeldPiece, Tensor]]] = {name: [] for name in whole.names}
    for pieces, vector in parts:
        values = torch.split(vector, [torch.Size(piece.shape).numel() for piece in pieces])
        for piece, value in zip(pieces, values, strict=True):
            found[piece.name].append((piece, value.view(piece.shape)))
    return torch.cat(
        [_joined(name, shape, found[name]) for name, shape in zip(whole.names, whole.shapes, strict=True)]
    )


def _joined(name: str, shape: torch.Size, held: Sequence[tuple[HeldPiece, Tensor]]) -> Tensor:
    dimension = held[0][0].dimension if held else None
    tensors = [tensor for _, tensor in held]
    value = tensors[0] if len(tensors) == 1 or (dimension is None and tensors) else None
    if value is None and dimension is not None:
        value = torch.cat(tensors, dimension)
    if value is None or value.shape != shape:
        raise ValueError(f"the processes of a group do not hold all of {name!r}, of shape {tuple(shape)}")
    return value.reshape(-1)
