"""Averages of sparse vectors in virtual time: stripes against recursive doubling.

Every worker has a random gradient, and a codec sends a small share of it. Virtual time is exact: the output
depends only on the arguments.

    python benchmarks/sparse_sums.py [--codec top_k:density=0.001] [--elements 10000000]
        [--workers 2,3,4,8,16] [--rates 100Mbit,1Gbit,10Gbit] [--latencies 100us,1ms,20ms] [--json FILE]

For each number of workers and each network: milliseconds of one average by both algorithms, how many times
faster doubling is, and whether `auto` takes the faster one. The last line is JSON: the ratio of each case.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shoal.codecs import CODECS
from shoal.collectives import LinkCost
from shoal.core.codec import Codec
from shoal.core.replica import Parameters
from shoal.launch.join import choose_mean
from shoal.sim import Network, Simulation
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class OneAverage(Strategy):
    """All workers average one vector each."""

    vectors: tuple[Tensor, ...] = ()

    async def worker(self, w: Node) -> None:
        await w.mean(self.vectors[w.rank], 1.0)


def seconds(
    collective: str, codec: Codec, vectors: tuple[Tensor, ...], network: Network
) -> tuple[float, int]:
    """Virtual seconds of one average, and the bytes sent by worker 0."""
    link = LinkCost.of_network(network.latency, network.bandwidth)
    x = torch.zeros_like(vectors[0])  # shared: no worker changes it
    run = Simulation(
        OneAverage(vectors),
        lambda rank: Parameters(x),
        workers=len(vectors),
        steps=1,
        network=network,
        codec=codec,
        mean=choose_mean(collective, None, codec, len(vectors), link),
    ).run()
    return run.seconds, run.worker(0).meter.bytes_sent


def measure(codec: Codec, vectors: tuple[Tensor, ...], networks: list[str]) -> list[dict[str, Any]]:
    """Both algorithms, and the choice of `auto`, on each of these networks."""
    rows = []
    for text in networks:
        network = Network.parse(text)
        striped, striped_bytes = seconds("stripes", codec, vectors, network)
        doubled, doubled_bytes = seconds("sparse_doubling", codec, vectors, network)
        automatic, _ = seconds("auto", codec, vectors, network)
        rows.append(
            {
                "workers": len(vectors),
                "network": text,
                "stripes": striped,
                "doubling": doubled,
                "auto": automatic,
                "stripes_bytes": striped_bytes,
                "doubling_bytes": doubled_bytes,
                "ratio": striped / doubled,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, caption="ratio: how many times faster doubling is. sent: by worker 0.")
    columns = (
        "workers",
        "network",
        "stripes, ms",
        "doubling, ms",
        "ratio",
        "stripes sent",
        "doubling sent",
        "auto",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "network" else "right")
    for r in rows:
        name = "doubling" if r["auto"] == r["doubling"] else "stripes"
        best = r["auto"] == min(r["stripes"], r["doubling"])
        table.add_row(
            str(r["workers"]),
            r["network"],
            f"{1e3 * r['stripes']:.2f}",
            f"{1e3 * r['doubling']:.2f}",
            f"{r['ratio']:.2f}",
            f"{r['stripes_bytes'] / 1e3:.0f} kB",
            f"{r['doubling_bytes'] / 1e3:.0f} kB",
            name if best else f"{name}, slower",
        )
    Console(width=max(Console().width, 120)).print(table)


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", default="top_k:density=0.001")
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--workers", type=words, default="2,3,4,8,16")
    parser.add_argument("--rates", type=words, default="100Mbit,1Gbit,10Gbit")
    parser.add_argument("--latencies", type=words, default="100us,1ms,20ms")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    codec = CODECS.read(options.codec)
    networks = [f"{rate},{latency}" for rate in options.rates for latency in options.latencies]
    most = max(map(int, options.workers))
    drawn = tuple(
        torch.randn(options.elements, generator=torch.Generator().manual_seed(rank)) for rank in range(most)
    )
    rows = [row for n in map(int, options.workers) for row in measure(codec, drawn[:n], networks)]
    show(rows, f"{options.codec}, {options.elements:,} elements, virtual time")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(json.dumps({f"{r['workers']},{r['network']}": round(r["ratio"], 3) for r in rows}))


if __name__ == "__main__":
    main()
