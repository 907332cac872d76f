"""Several payloads as two tensors: a table, and all their bytes.

The table has four pairs of numbers for each payload: the dtype of a tensor, as its place among those that a
message may carry, and its elements; -1 and 0 where the payload has fewer tensors. The bytes of each tensor
are filled up to a multiple of 8, so that each begins where any dtype may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.core.codec import Payload
from shoal.core.errors import WireError
from shoal.core.transport import DTYPES, MOST_PARTS

NONE = (-1, 0)


def join(payloads: Sequence[Payload], device: torch.device) -> tuple[Tensor, Tensor]:
    """The table and the bytes."""
    parts = [part for payload in payloads for part in payload]
    rows = [[(DTYPES.index(part.dtype), part.numel()) for part in payload] for payload in payloads]
    table = torch.tensor([row + [NONE] * (MOST_PARTS - len(row)) for row in rows], dtype=torch.int64)
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return table.flatten(), torch.cat([nothing, *(_filled(part).to(device) for part in parts)])


def split(table: Tensor, written: Tensor) -> list[Payload]:
    """The payloads again; raises WireError for a table that does not say what the bytes are."""
    if written.data_ptr() % 8 or written.storage_offset() % 8:
        written = written.clone()
    payloads, at = [], 0
    for row in table.view(-1, MOST_PARTS, 2).tolist():
        payload: list[Tensor] = []
        for dtype, elements in _tensors(row):
            nbytes = elements * dtype.itemsize
            if at + nbytes > written.numel():
                raise WireError(f"a table tells of more than the {written.numel()} bytes that came with it")
            payload.append(written[at : at + nbytes].view(dtype))
            at += -(-nbytes // 8) * 8
        payloads.append(tuple(payload))
    if at != written.numel():
        raise WireError(f"a table tells of {at} bytes, and {written.numel()} came with it")
    return payloads


def _tensors(row: list[list[int]]) -> Iterator[tuple[torch.dtype, int]]:
    told = [tuple(pair) for pair in row]
    while told and told[-1] == NONE:
        told.pop()
    for place, elements in told:
        if not (0 <= place < len(DTYPES) and elements >= 0):
            raise WireError(f"a table tells of {elements} elements of the dtype number {place}")
        yield DTYPES[place], elements


def _filled(part: Tensor) -> Tensor:
    if not part.numel():  # which has no last dimension to see as bytes, wherever it comes from
        return torch.empty(0, dtype=torch.uint8)
    raw = part.contiguous().flatten().view(torch.uint8)
    return pad(raw, (0, -raw.numel() % 8))
