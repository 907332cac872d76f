"""How long a worker of `sparse_loco` takes to encode what it sends, with kernels and in lines of torch.

    python benchmarks/sparse_loco_encoding.py [--layers 10] [--rounds 7] [--device cuda]

One thread updates the error of a model of layers of 1024 x 1024, selects the largest elements of every chunk,
encodes them in two bits and takes them from the error. Kernels and lines of torch take turns. Seconds are the
thread's own; on a GPU, those from the call until it is done. The last line is JSON: milliseconds for each 10
million parameters, in the median, of both, of the update and selection alone, and of reading one message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from codec_speed import lines_of_torch

from shoal.chunks.chunk_selection import ChunkSelection
from shoal.core.parameter_chunks import chunks_of
from shoal.core.vector import Layout
from shoal.strategies import SparseLoCo

SIDE = 1024


class Encoding:
    """A worker's side of a round, again and again."""

    def __init__(self, layers: int, device: str) -> None:
        layout = Layout(tuple(f"{n}.weight" for n in range(layers)), (torch.Size((SIDE, SIDE)),) * layers)
        self.strategy = SparseLoCo()
        chunks = tuple(chunks_of(layout.pieces(0, layout.numel), self.strategy.chunk))
        kept = tuple(max(1, round(each.length * self.strategy.density)) for each in chunks)
        self.selection = ChunkSelection(chunks, kept)
        chance = torch.Generator().manual_seed(0)
        self.start, self.x = (torch.randn(layout.numel, generator=chance).to(device) for _ in range(2))
        self.error = torch.zeros_like(self.x)
        self.places: list[torch.Tensor] = []
        self.parts: tuple[torch.Tensor, ...] = ()

    def select(self) -> None:
        """The displacement, error feedback and the largest elements."""
        self.places = self.selection.update(self.error, self.strategy.decay, self.start, self.x)

    def encode(self) -> None:
        """Two bits for each, the message, and the error that is left."""
        self.parts = self.strategy._encode(self.selection, self.error, self.places)

    def read(self) -> None:
        """Read the message, and merge it with no other."""
        self.strategy._merge(self.selection, self.x, [(1.0, self.parts)])


def seconds(work: Callable[[], None], device: str) -> float:
    """How long it takes."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Encoding(options.layers, options.device)
    spent: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):  # the first compiles, and does not count
        for way in ("kernels", "torch"):
            with nullcontext() if way == "kernels" else lines_of_torch():
                for name, part in (("select", work.select), ("encode", work.encode), ("read", work.read)):
                    took = seconds(part, options.device)
                    if number:
                        spent.setdefault(f"{way} {name}", []).append(took)
    scale = 1e3 * 10_000_000 / work.x.numel()
    medians = {name: round(scale * statistics.median(each), 1) for name, each in spent.items()}
    for name in ("select", "encode", "read"):
        plain, fast = medians[f"torch {name}"], medians[f"kernels {name}"]
        print(f"{name:8} lines of torch {plain:8.1f} ms   kernels {fast:7.1f} ms   {plain / fast:5.1f} times")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
