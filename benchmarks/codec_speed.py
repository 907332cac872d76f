"""How fast codecs write vectors down and read them back, as ratios to a copy in memory in the same run.

    python benchmarks/codec_speed.py [--elements 75_000_000] [--rounds 5] [--codecs fp16,one_bit]
        [--device cuda] [--arrived] [--lines 5_000_000] [--json FILE]

One thread compresses 75 million float32 (300 MB), the layers of a model, again and again. What a payload
lacks is kept and added the next time where the codec does so by default; checksums are part of it. Every
round visits a copy of the vector and all codecs in turn; a figure is the median over the rounds, its spread
the quartiles. A rate is the bytes of the vector by the seconds, which are the thread's own: those in which
another process had the core do not count. Beside each codec is the same without kernels, in lines of torch,
on fewer elements for time's sake; where a cache holds these, more `--lines` are fairer.

The last line is JSON: for each codec its rate, writing and reading together, as a share of the copy's; of
those that seek elements, writing alone. `one_bit` and `ternary` are with feedback, `one_bit_none` and
`ternary_none` without.

A copy reads a vector and writes one. With feedback, three are read or written while encoding and one while
decoding, so that a codec that is as fast as memory has half the copy's rate. Hence the share by traffic: the
bytes that must be read and written, payloads included, by the seconds, over those of the copy.

On a GPU, seconds are those from a call to the end of its work, and, in a second line, those of the device
alone: it is kept busy until all that a call asks for is in its queue. What the processor takes to ask shows
in the first, not in the second. The JSON has both and both by traffic, under names that end in `_traffic`,
`_device` and `_device_traffic`. A payload that never left a GPU is not checked when it is read there; with
`--arrived`, copies are read, which are, and the processor waits for what the device finds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from shoal.codecs import CODECS
from shoal.core.codec import Codec, Payload
from shoal.core.vector import Layout, Piece
from shoal.kernels import dispatch as kernels

ELEMENTS = 75_000_000
WIDTH = 1000  # of the layers, which are square

TARGETS = {
    **dict.fromkeys(("one_bit", "one_bit_none", "ternary", "ternary_none"), 0.25),
    **dict.fromkeys(("fp16", "bf16"), 0.3),
    **dict.fromkeys(("threshold", "top_k"), 0.15),
}
ON_GPU = dict.fromkeys(("one_bit", "one_bit_none", "ternary", "ternary_none"), 0.6)
ENCODING_ALONE = ("threshold", "top_k")

Work = Callable[[], object]
Clock = Callable[[Work], float]


def chosen(words: list[str]) -> dict[str, Codec]:
    """The codecs of these words with their default options, by the names of their figures."""
    codecs = {}
    for word in words:
        codecs[word] = CODECS.make(word)
        if word in ("one_bit", "ternary"):
            kept = CODECS.make(word, feedback="residual")
            codecs |= {word: kept, f"{word}_none": CODECS.make(word, feedback="none")}
    return codecs


def layers(elements: int) -> list[Piece]:
    """Square layers, and a bias of what is left."""
    squares, left = divmod(elements, WIDTH * WIDTH)
    names = [f"{number}.weight" for number in range(squares)] + ["bias"] * (left > 0)
    shapes = [(WIDTH, WIDTH)] * squares + [(left,)] * (left > 0)
    return list(Layout(tuple(names), tuple(map(torch.Size, shapes))).pieces(0, elements))


class Visit:
    """A codec at work on a stream of vectors, as it is between two nodes."""

    def __init__(self, codec: Codec, v: Tensor, out: Tensor) -> None:
        self.codec, self.v, self.out = codec, v, out
        self.state = codec.init(v)
        self.rest = torch.zeros_like(v) if codec.feedback != "none" else None
        self.payload: Payload = ()

    def encode(self) -> None:
        """Write the vector down, and keep what that lacks."""
        self.payload = ()  # its memory may be taken again, as after a send
        if self.rest is None:
            self.payload, self.state = self.codec.encode(self.v, self.state)
        else:
            self.payload, self.state = self.codec.encode_rest(self.v, self.rest, self.state)

    def travel(self) -> None:
        """As if the payload had come from elsewhere."""
        self.payload = tuple(part.clone() for part in self.payload)

    def decode(self) -> None:
        """Read it back."""
        self.codec.decode(tuple(part.to(self.v.device) for part in self.payload), self.out)

    def share(self) -> float:
        """Of the vector's bytes, that which travels."""
        return sum(part.nbytes for part in self.payload) / self.v.nbytes

    def moved(self, decoding: bool) -> float:
        """How many vectors must be read or written: it, what it lacked twice, and the payload; and back."""
        encode = 1 + self.share() + (0 if self.rest is None else 2)
        return encode + (self.share() + 1 if decoding else 0)


@dataclass
class Figures:
    """Seconds of every visit, of vectors of so many bytes; what share of these travels, and what is moved."""

    nbytes: int
    seconds: dict[str, list[float]]
    shares: dict[str, float]
    moved: dict[str, float]  # vectors read or written, at least

    def rate(self, name: str) -> float:
        """GB/s in the median."""
        return self.nbytes / statistics.median(self.seconds[name]) / 1e9

    def counted(self, name: str) -> list[float]:
        """Seconds of what its target is about."""
        encode, decode = self.seconds[f"{name} encode"], self.seconds[f"{name} decode"]
        return encode if name in ENCODING_ALONE else [a + b for a, b in zip(encode, decode, strict=True)]

    def over_copy(self, name: str) -> list[float]:
        """Its rate as a share of the copy's, in every round."""
        return [copy / spent for copy, spent in zip(self.seconds["copy"], self.counted(name), strict=True)]

    def share(self, name: str) -> float:
        """The same in the median."""
        return statistics.median(self.over_copy(name))

    def by_traffic(self, name: str) -> float:
        """The bytes it moves by its seconds, as a share of the copy's, in the median."""
        return self.moved[name] / 2 * self.share(name)


def measure(
    codecs: dict[str, Codec], elements: int, rounds: int, clock: Clock, device: str, arrived: bool = False
) -> Figures:
    """Visit all in turn; the first round warms up and does not count."""
    v = 1e-3 * torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(device)
    out, pieces = torch.zeros_like(v), layers(elements)
    visits = {name: Visit(codec.fit(pieces), v, out) for name, codec in codecs.items()}
    works: dict[str, Work] = {"copy": lambda: out.copy_(v)}
    for name, visit in visits.items():
        works |= {f"{name} encode": visit.encode, f"{name} decode": visit.decode}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            if arrived and name.endswith(" decode"):
                visits[name.removesuffix(" decode")].travel()
            spent = clock(work)
            if number:
                seconds[name].append(spent)
    shares = {name: visit.share() for name, visit in visits.items()}
    moved = {name: visit.moved(name not in ENCODING_ALONE) for name, visit in visits.items()}
    return Figures(v.nbytes, seconds, shares, moved)


def of_thread(work: Work) -> float:
    """Seconds that the thread itself had."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def until_done(work: Work) -> float:
    """Seconds from the call until the GPU is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class OnDevice:
    """Seconds of the GPU alone, which is busy with something else while its queue fills."""

    def __init__(self) -> None:
        self.busy = torch.zeros(2, ELEMENTS, device="cuda")  # ten copies take longer than any call

    def __call__(self, work: Work) -> float:
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(10):
            self.busy[0].copy_(self.busy[1])
        began.record()
        work()
        done.record()
        done.synchronize()
        return float(began.elapsed_time(done)) / 1e3


@contextmanager
def lines_of_torch() -> Iterator[None]:
    """Without kernels."""
    with patch.multiple(kernels, _has_numba=lambda: False, _has_triton=lambda: False):
        yield


def show(full: Figures, few: Figures, alone: Figures | None) -> dict[str, float]:
    """Print a line for each codec, on a GPU two; the medians of their shares of a copy's rate."""
    copies = " and ".join(f"{figures.rate('copy'):.2f}" for figures in (full, alone) if figures)
    print(f"a copy: {copies} GB/s; in lines of torch: {few.nbytes / 4e6:g} million elements")
    print(f"  {'':13} encode decode GB/s   bytes   share of the copy's rate   traffic  by its lines of torch")
    medians = {}
    for name, share in full.shares.items():
        plain = statistics.median(few.counted(name)) * full.nbytes / few.nbytes
        faster = f"{plain / statistics.median(full.counted(name)):6.1f} times"
        print(f"  {name:13} {line(name, full, f'{share:.4f}', faster, alone is not None)}")
        medians[name] = full.share(name)
        if alone is not None:
            print(f"  {'  the device':13} {line(name, alone, '', '', True)}")
            medians |= {f"{name}_traffic": full.by_traffic(name), f"{name}_device": alone.share(name)}
            medians[f"{name}_device_traffic"] = alone.by_traffic(name)
    return {name: round(median, 3) for name, median in medians.items()}


def line(name: str, figures: Figures, size: str, faster: str, on_gpu: bool) -> str:
    """Its rates and shares, and whether that is enough."""
    rates = f"{figures.rate(f'{name} encode'):7.2f} {figures.rate(f'{name} decode'):7.2f}"
    low, middle, high = spread(figures.over_copy(name))
    shares = f"{middle:6.3f}   ({low:.3f} to {high:.3f})   {figures.by_traffic(name):6.3f}"
    goal = aim(name, middle, figures.by_traffic(name), on_gpu)
    return f"{rates}    {size:6}  {shares}   {faster:12}{goal}"


def aim(name: str, share: float, traffic: float, on_gpu: bool) -> str:
    """What it should reach, and whether it does."""
    targets = ON_GPU if on_gpu else TARGETS
    if name not in targets:
        return ""
    alone = "encoding " if name in ENCODING_ALONE else ""
    met = "met" if share >= targets[name] else "MISSED"
    if on_gpu and share < targets[name] <= traffic:
        met = "met by traffic alone"
    return f"   {alone}at least {targets[name]:g}: {met}"


def spread(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    """Measure, print, and say which targets were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default=",".join(word for word in CODECS if word != "none"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--arrived", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    codecs = chosen(options.codecs.split(","))
    size = f"{options.elements:,} float32, {4 * options.elements / 1e6:g} MB"
    print(f"{size}, {options.rounds} rounds; one thread, {options.device}")
    on_gpu, where = options.device == "cuda", (options.device, options.arrived)
    clock = until_done if on_gpu else of_thread
    with lines_of_torch():
        few = measure(codecs, min(options.lines, options.elements), 1, clock, options.device)
    full = measure(codecs, options.elements, options.rounds, clock, *where)
    alone = None
    if on_gpu:
        alone = measure(codecs, options.elements, options.rounds, OnDevice(), *where)
    medians = show(full, few, alone)
    if options.json is not None:
        options.json.write_text(json.dumps(medians, indent=2) + "\n")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
