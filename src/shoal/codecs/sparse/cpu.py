"""Sparse codecs on a CPU: one pass adds the residual and finds the large elements, another packs the gaps.

Without the sign bit, floats are in the order of their bits, NaN above all; and integers are compared several
at a time.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.codecs.draws import COUNTER, SEED, STEP
from shoal.codecs.draws_cpu import draw
from shoal.core.codec import State
from shoal.kernels.dispatch import compiled

BLOCK = 4096  # elements that stay in cache from the sum to the last look
BELOW_SIGN, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
NONE = np.empty(0, np.float32)
BYTE, EIGHT = np.uint64(255), np.uint64(8)

Push: TypeAlias = "tuple[Any, bool]"
"""Momentum, in float32, and whether it is Nesterov's."""

STILL: Push = (np.float32(0), False)


# ------------------------------------------------------------------------------------------------ selection


def above(u: Tensor, tau: float, add: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `selection.above`."""
    array, added, room = u.detach().numpy(), _array(add), u.numel() // 64 + BLOCK
    least = np.float32(tau).view(np.int32) + np.int32(1)
    found, large = np.empty(room, np.int64), np.empty(room, np.float32)
    begin, count = _scan(array, added, NONE, STILL, least, 0, found, large, 0)
    while begin < array.size:
        found, large = (np.concatenate([part, np.empty_like(part)]) for part in (found, large))
        begin, count = _scan(array, added, NONE, STILL, least, begin, found, large, count)
    return torch.from_numpy(found[:count]), torch.from_numpy(large[:count])


def largest(
    u: Tensor, k: int, add: Tensor | None, some: Tensor, velocity: Tensor | None = None, push: Push = STILL
) -> tuple[Tensor, Tensor]:
    """As `selection.largest`; `some`, a sample of the magnitudes, gives a first guess of the least of them.

    With a velocity, `add` is the gradient that pushes it, and the velocity is added to `u`: see `dgc.py`.
    """
    array, added, room = u.detach().numpy(), _array(add), min(2 * k, u.numel()) + 2 * BLOCK
    least = _guess(some, k, u.numel())
    moving = _array(velocity)
    found, large = np.empty(room, np.int64), np.empty(room, np.float32)
    begin, count = _scan(array, added, moving, push, least, 0, found, large, 0)
    while begin < array.size or (count < k and least > 1):
        if begin < array.size:  # too many: from here on, seek only what exceeds the k largest so far
            least = _cut(found[:count], large[:count], k) + np.int32(1)
            begin, count = _scan(array, added, moving, push, least, begin, found, large, k)
        else:  # too few: the guess was too high; start again without one
            least, added, moving = np.int32(1), NONE, NONE
            begin, count = _scan(array, added, moving, push, least, 0, found, large, 0)
    if count > k:
        _cut(found[:count], large[:count], k)
        count = k
    return torch.from_numpy(found[:count]), torch.from_numpy(large[:count])


def _array(add: Tensor | None) -> Any:
    return NONE if add is None else add.detach().numpy()


def _guess(some: Tensor, k: int, elements: int) -> Any:
    """The bits of a magnitude that at least k of all elements very likely reach."""
    expected = k * some.numel() / elements
    rank = int(expected + 4 * sqrt(expected) + 4)
    bits = int(some.topk(rank).values[-1:].view(torch.int32)) if rank < some.numel() else 1
    return np.int32(min(max(1, bits), int(INFINITE)))


def _cut(found: Any, large: Any, k: int) -> Any:
    """Move the k largest to the front; return the bits of the least of them."""
    bits = np.minimum(large.view(np.int32) & BELOW_SIGN, INFINITE)
    edge = np.partition(bits, -k)[-k]
    chosen = bits > edge
    chosen[np.flatnonzero(bits == edge)[: k - np.count_nonzero(chosen)]] = True
    found[:k], large[:k] = found[chosen], large[chosen]
    return edge


@compiled
def _scan(
    u: Any, added: Any, velocity: Any, push: Any, least: Any, begin: int, found: Any, large: Any, count: int
) -> Any:
    """Append the positions where the bits of `u` are at least `least`, and the elements there.

    First adds `added` to `u`, unless it is empty. If `velocity` is not empty either, `added` pushes the
    velocity as `push` says, and the velocity is added to `u`. Goes from `begin` to the end, or until `found`
    may not have room for another block. Returns where it stopped, and how many it found so far.
    """
    bits = u.view(np.int32)
    marks = np.zeros(BLOCK, np.uint8)
    while begin < u.size and count + BLOCK <= found.size:
        end = min(begin + BLOCK, u.size)
        if velocity.size:
            _push(u[begin:end], added[begin:end], velocity[begin:end], push)
        elif added.size:
            _add(u[begin:end], added[begin:end])
        marks[end - begin :] = 0
        _mark(bits[begin:end], least, marks)
        count = _collect(u[begin:end], marks, begin, found, large, count)
        begin = end
    return begin, count


@compiled
def _add(u: Any, added: Any) -> None:
    for i in range(u.size):
        u[i] += added[i]


@compiled
def _push(u: Any, g: Any, velocity: Any, push: Any) -> None:
    momentum, nesterov = push
    if nesterov:
        for i in range(u.size):
            velocity[i] = (velocity[i] + g[i]) * momentum
            u[i] = (u[i] + velocity[i]) + g[i]
    else:
        for i in range(u.size):
            velocity[i] = velocity[i] * momentum + g[i]
            u[i] += velocity[i]


@compiled
def _mark(bits: Any, least: Any, marks: Any) -> None:
    for i in range(bits.size):
        marks[i] = (bits[i] & BELOW_SIGN) >= least


@compiled
def _collect(u: Any, marks: Any, begin: int, found: Any, large: Any, count: int) -> int:
    eights = marks.view(np.uint64)  # most are 0
    for eight in range((u.size + 7) // 8):
        if eights[eight]:
            for i in range(8 * eight, min(8 * eight + 8, u.size)):
                found[count] = begin + i
                large[count] = u[i]
                count += marks[i]
    return count


# ------------------------------------------------------------------------------------------------- random_k


def drawn(state: State, count: int, elements: int) -> tuple[Tensor, Tensor]:
    """As `random_k.drawn`."""
    draws = np.empty(2 * count, np.float32)
    draw(int(state[SEED]), int(state[COUNTER]), draws)
    positions, lengths = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    _places(draws, elements, positions.numpy(), lengths.numpy())
    return positions, lengths


def taken(rest: Tensor, add: Tensor, positions: Tensor) -> Tensor:
    """Add to `rest`, then take the elements at these rising positions out of it, which leaves zeros there.

    The first is NaN if any element of the sum is not finite.
    """
    values = torch.empty(positions.numel())
    if not _take(rest.numpy(), add.detach().numpy(), positions.numpy(), values.numpy()):
        values[0] = torch.nan
    return values


@compiled
def _places(draws: Any, elements: int, positions: Any, lengths: Any) -> None:
    begin, step = 0, np.float64(STEP)
    for i in range(positions.size):
        length = elements // positions.size + (i < elements % positions.size)
        share = np.float64(draws[2 * i]) + np.float64(draws[2 * i + 1]) * step
        positions[i], lengths[i] = begin + np.int64(share * length), length
        begin += length


@compiled
def _take(rest: Any, add: Any, positions: Any, values: Any) -> Any:
    count, most = 0, np.int32(0)
    for begin in range(0, rest.size, BLOCK):
        part, other = rest[begin : begin + BLOCK], add[begin : begin + BLOCK]
        for i in range(part.size):
            total = np.float32(part[i] + other[i])
            part[i] = total
            most = max(most, np.float32(total).view(np.int32) & BELOW_SIGN)
        while count < positions.size and positions[count] < begin + part.size:
            values[count] = rest[positions[count]]
            rest[positions[count]] = 0
            count += 1
    return most < INFINITE


# ----------------------------------------------------------------------------------------------------- gaps


def pack(positions: Tensor, k: int, signs: Tensor | None) -> Tensor:
    """The stream of these positions; as `gaps.pack`."""
    signed = signs is not None
    marks = np.zeros(0, np.uint8) if signs is None else signs.byte().numpy()
    return torch.from_numpy(_pack(positions.contiguous().numpy(), marks, k, signed))


def unpack(stream: Tensor, count: int, elements: int, k: int, signed: bool) -> tuple[Tensor, Tensor] | None:
    """The positions and signs in a stream with room for all low bits; None if it is invalid."""
    positions, marks = np.empty(count, np.int64), np.empty(count if signed else 0, np.bool_)
    if not _unpack(stream.contiguous().numpy(), elements, k, signed, positions, marks):
        return None
    return torch.from_numpy(positions), torch.from_numpy(marks)


@compiled
def _pack(positions: Any, signs: Any, k: int, signed: bool) -> Any:
    zeros, last = 0, -1
    for i in range(positions.size):
        zeros += (positions[i] - last - 1) >> k
        last = positions[i]
    width = k + signed
    first = (positions.size * width + 7) // 8
    stream = np.zeros(first + (positions.size + zeros + 7) // 8, np.uint8)
    held, filled, at = np.uint64(0), 0, 0  # bits that do not fill a byte yet
    bit, last = 8 * first, -1
    for i in range(positions.size):
        gap = positions[i] - last - 1
        last = positions[i]
        low = gap & ((1 << k) - 1)
        if signed:
            low |= np.int64(signs[i]) << k
        held |= np.uint64(low) << np.uint64(filled)
        filled += width
        while filled >= 8:
            stream[at] = held & BYTE
            held >>= EIGHT
            filled -= 8
            at += 1
        bit += gap >> k
        stream[bit >> 3] |= np.uint8(1 << (bit & 7))
        bit += 1
    if filled:
        stream[at] = held & BYTE
    return stream


@compiled
def _unpack(stream: Any, elements: int, k: int, signed: bool, positions: Any, signs: Any) -> Any:
    width = k + signed
    first = (positions.size * width + 7) // 8
    held, filled, at = np.uint64(0), 0, 0
    count, position = 0, np.int64(-1)
    for byte in range(first, stream.size):
        ones = np.int64(stream[byte])
        for j in range(8):
            if not ones >> j & 1:
                position += np.int64(1) << k
                continue
            if count == positions.size:
                return False  # or the low bits would be read past their end
            while filled < width:
                held |= np.uint64(stream[at]) << np.uint64(filled)
                filled += 8
                at += 1
            position += 1 + np.int64(held & np.uint64((1 << k) - 1))
            if position >= elements:
                return False
            positions[count] = position
            if signed:
                signs[count] = held >> np.uint64(k) & np.uint64(1)
            held >>= np.uint64(width)
            filled -= width
            count += 1
    return count == positions.size
