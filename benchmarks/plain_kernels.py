"""Hand-written LLVM (`shoal.codecs.lanes`) against Numba, PyTorch and torch.compile, alternating in one run.

    python benchmarks/plain_kernels.py [--elements 20_000_000] [--rounds 9]

One thread. Every round times each kernel in each form; a figure is the median over the rounds of the speed as
a share of that of the lanes, its spread the quartiles. Seconds are the thread's own. The plain loops leave
out what real kernels must handle (short blocks, values that are not finite), which flatters them a little.
docs/codecs.md has the conclusion: lanes stay where nothing plainer reaches 0.9 of their speed.

torch.compile needs a C++ compiler; without one its rows are left out.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from shoal.codecs import draws
from shoal.codecs.halves import cpu as halves
from shoal.codecs.one_bit import cpu as one_bit
from shoal.codecs.packing import words
from shoal.codecs.ternary import cpu as ternary

plain = njit(nogil=True, error_model="numpy")
fused = njit(nogil=True, error_model="numpy", fastmath={"contract"})  # x * y + z in one instruction
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
COLUMN, BLOCK = 512, 2048
CODE, SIGN, BELOW_SIGN = np.int32(-(2**30)), np.int32(-(2**31)), np.int32(2**31 - 1)


@plain
def one_bit_encode(v: Any, rest: Any, signs: Any, values: Any) -> None:
    low, high, bits = np.zeros(16, np.float32), np.zeros(16, np.float32), np.zeros(16, np.uint32)
    for c in range(values.size // 2):
        low[:], high[:], bits[:] = ZERO, ZERO, np.uint32(0)
        for row in range(COLUMN // 16):
            for j in range(16):
                i = c * COLUMN + 16 * row + j
                u = np.float32(v[i] + rest[i])
                rest[i] = u
                low[j] += min(u, ZERO)
                high[j] += max(u, ZERO)
                bits[j] |= np.uint32(u >= ZERO) << np.uint32(row)
        below, above, many = ZERO, ZERO, 0
        for j in range(16):
            below, above = below + low[j], above + high[j]
            signs[16 * c + j] = bits[j]
            word = bits[j]
            while word:
                word &= word - np.uint32(1)
                many += 1
        below, above = below / max(np.float32(COLUMN - many), ONE), above / max(np.float32(many), ONE)
        values[2 * c], values[2 * c + 1] = below, above
        for i in range(c * COLUMN, (c + 1) * COLUMN):
            rest[i] -= below if rest[i] < ZERO else above


@plain
def one_bit_decode(signs: Any, values: Any, column: int, out: Any) -> None:
    for c in range(values.size // 2):
        below, above = values[2 * c], values[2 * c + 1]
        for group in range(c * column, (c + 1) * column, 512):
            bits = signs[group // 32 : group // 32 + 16]
            for row in range(32):
                part = out[group + 16 * row : group + 16 * row + 16]
                for j in range(16):
                    part[j] = above if (bits[j] >> np.uint32(row)) & np.uint32(1) else below


@fused
def ternary_encode(v: Any, rest: Any, clip: float, table: Any, masks: Any, codes: Any, scales: Any) -> None:
    squares, bits = np.zeros(16, np.float32), np.zeros(16, np.int32)
    for b in range(scales.size):
        squares[:], top = ZERO, np.int32(0)
        for i in range(b * BLOCK, (b + 1) * BLOCK, 16):
            for j in range(16):
                u = np.float32(v[i + j] + rest[i + j])
                rest[i + j] = u
                squares[j] += u * u
                top = max(top, np.float32(u).view(np.int32) & BELOW_SIGN)
        deviation = np.float32(clip * np.sqrt(np.float64(squares.sum()) / BLOCK))
        scale = min(np.int32(top).view(np.float32), deviation)
        scales[b] = scale
        each = ONE / scale
        for group in range(b * BLOCK, (b + 1) * BLOCK, 256):
            bits[:] = np.int32(0)
            for row in range(16):
                for j in range(16):
                    i = group + 16 * row + j
                    u = rest[i]
                    drawn = (table[i - b * BLOCK] ^ masks[b]) | (np.float32(u).view(np.int32) & SIGN)
                    code = np.float32(u * each + np.int32(drawn).view(np.float32)).view(np.int32) & CODE
                    rest[i] = np.float32(u - np.int32(code).view(np.float32) * (scale * HALF))
                    bits[j] |= ((code >> np.int32(30)) & np.int32(3)) << np.int32(2 * row)
            codes[group // 16 : group // 16 + 16] = bits


@plain
def ternary_decode(codes: Any, scales: Any, block: int, out: Any) -> None:
    for b in range(scales.size):
        half = scales[b] * HALF
        for group in range(b * block, (b + 1) * block, 256):
            bits = codes[group // 16 : group // 16 + 16]
            for row in range(16):
                part = out[group + 16 * row : group + 16 * row + 16]
                for j in range(16):
                    code = (bits[j] << np.int32(30 - 2 * row)) & CODE
                    part[j] = np.int32(code).view(np.float32) * half


def one_bit_encode_torch(v: Tensor, rest: Tensor, signs: Tensor, values: Tensor) -> None:
    rest.add_(v)
    u = rest.view(-1, COLUMN // 16, 16)
    above = u >= 0
    many = above.sum((1, 2))
    low = u.clamp(max=0).sum((1, 2)) / (COLUMN - many).clamp(min=1)
    high = u.clamp(min=0).sum((1, 2)) / many.clamp(min=1)
    u.sub_(torch.where(above, high[:, None, None], low[:, None, None]))
    row = torch.arange(COLUMN // 16, dtype=torch.int32)[:, None]
    signs.view(-1, 16).copy_((above.to(torch.int32) << row).sum(1))
    values.view(-1, 2).copy_(torch.stack((low, high), 1))


def one_bit_decode_torch(signs: Tensor, values: Tensor, out: Tensor) -> None:
    row = torch.arange(COLUMN // 16, dtype=torch.int32)[:, None]
    above = (signs.view(-1, 1, 16) >> row) & 1
    low, high = values.view(-1, 2, 1, 1).unbind(1)
    out.view(-1, COLUMN // 16, 16).copy_(torch.where(above.bool(), high, low))


def ternary_encode_torch(
    v: Tensor, rest: Tensor, clip: float, drawn: Tensor, codes: Tensor, scales: Tensor
) -> None:
    rest.add_(v)
    u = rest.view(-1, BLOCK)
    scale = torch.minimum(u.abs().amax(1), clip * u.square().mean(1).sqrt())[:, None]
    trits = torch.where(drawn < u.abs() / scale, u.sign(), 0.0)
    u.sub_(trits * scale)
    shift = 2 * torch.arange(16, dtype=torch.int32)[:, None]
    groups = (trits.to(torch.int32) & 3).view(-1, 16, 16)
    codes.view(-1, 16).copy_((groups << shift).sum(1))
    scales.copy_(scale[:, 0])


def ternary_decode_torch(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    shift = 2 * torch.arange(16, dtype=torch.int32)[:, None]
    trits = ((codes.view(-1, 1, 16) >> shift) & 3).view(-1, BLOCK)
    out.view(-1, BLOCK).copy_((trits - 4 * (trits >> 1)) * scales[:, None])


def fp16_encode_torch(v: Tensor, half: Tensor) -> None:
    half.copy_(v.clamp(-halves.LARGEST, halves.LARGEST))


def kernels(n: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Every kernel in each form, on vectors of so many elements."""
    v, out = 1e-3 * torch.randn(n, generator=torch.Generator().manual_seed(0)), torch.zeros(n)
    rests = [torch.zeros(n) for _ in range(6)]
    signs, means = torch.empty(words(n, 1), dtype=torch.int32), torch.empty(2 * n // COLUMN)
    codes, scales = torch.empty(words(n, 2), dtype=torch.int32), torch.empty(n // BLOCK)
    state, half = draws.start(0), torch.empty(n, dtype=torch.float16)
    noise = ternary._noise(state, BLOCK, n // BLOCK)
    drawn = torch.rand(n // BLOCK, BLOCK)
    x, y, bits = v.numpy(), out.numpy(), signs.numpy().view(np.uint32)
    left, right = rests[1].numpy(), rests[3].numpy()
    found: dict[str, dict[str, Callable[[], object]]] = {
        "one_bit encode": {
            "lanes": lambda: one_bit.encode(v, rests[0], COLUMN, signs, means),
            "numba": lambda: one_bit_encode(x, left, bits, means.numpy()),
        },
        "one_bit decode": {
            "lanes": lambda: one_bit.decode(signs, means, COLUMN, out),
            "numba": lambda: one_bit_decode(bits, means.numpy(), COLUMN, y),
        },
        "ternary encode": {
            "lanes": lambda: ternary.encode(v, rests[2], 1.5, BLOCK, state, codes, scales),
            "numba": lambda: ternary_encode(x, right, 1.5, *noise, codes.numpy(), scales.numpy()),
        },
        "ternary decode": {
            "lanes": lambda: ternary.decode(codes, scales, BLOCK, out),
            "numba": lambda: ternary_decode(codes.numpy(), scales.numpy(), BLOCK, y),
        },
        "fp16 encode": {
            "lanes": lambda: halves._to_half(x, n, halves._words(half)),
            "torch": lambda: half.copy_(v.clamp(-halves.LARGEST, halves.LARGEST)),
        },
        "fp16 decode": {
            "lanes": lambda: halves.decode(half, out),
            "torch": lambda: out.copy_(half),
        },
    }
    if shutil.which("c++"):
        compiled: dict[str, partial[None]] = {
            "one_bit encode": partial(one_bit_encode_torch, v, rests[4], signs, means),
            "one_bit decode": partial(one_bit_decode_torch, signs, means, out),
            "ternary encode": partial(ternary_encode_torch, v, rests[5], 1.5, drawn, codes, scales),
            "ternary decode": partial(ternary_decode_torch, codes, scales, out),
            "fp16 encode": partial(fp16_encode_torch, v, half),
        }
        for name, call in compiled.items():
            found[name]["compile"] = partial(torch.compile(call.func, fullgraph=True), *call.args)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n = options.elements // BLOCK * BLOCK
    forms = kernels(n)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds + 1):  # the first compiles, and does not count
        for name, ways in forms.items():
            for way, work in ways.items():
                began = time.thread_time()
                work()
                if number:
                    seconds.setdefault((name, way), []).append(time.thread_time() - began)
    for (name, way), spent in seconds.items():
        lanes = seconds[name, "lanes"]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(lanes, spent, strict=True)], n=4)
        rate = 4 * n / statistics.median(spent) / 1e9
        print(f"{name:15} {way:7} {rate:6.2f} GB/s  {middle:5.2f} of lanes ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
