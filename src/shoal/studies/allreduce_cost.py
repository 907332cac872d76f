"""The cost of an all-reduce: formulas (Ben-Nun & Hoefler 2018) and measured algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import log2
from typing import Any, ClassVar

from shoal.collectives import ALGORITHMS
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.sim import Compute, Network
from shoal.strategies.sync import Sync
from shoal.strategies.sync_server import SyncServer
from shoal.studies.clockwork import clockwork
from shoal.studies.study import Lab, Study, numbers
from shoal.vocabulary.strategy import Strategy

Formula = Callable[[int, float, float, float], float]
PUBLISHED: dict[str, Formula] = {  # workers, bytes, seconds of latency, seconds a byte -> seconds
    "tree": lambda p, n, latency, gap: 2 * log2(p) * (latency + n * gap),
    "butterfly": lambda p, n, latency, gap: log2(p) * (latency + n * gap),
    "ring": lambda p, n, latency, gap: 2 * (p - 1) * (latency + n * gap / p),
    "rabenseifner": lambda p, n, latency, gap: 2 * log2(p) * latency + 2 * n * gap * (p - 1) / p,
    "server": lambda p, n, latency, gap: 2 * latency + 2 * p * n * gap,
}
ROUNDS = 8
HEADINGS = (
    Heading("algorithm", "algorithm"),
    Heading("workers", "workers", 0),
    Heading("kilobytes", "kB", 0),
    Heading("published_ms", "formula ms", 3),
    Heading("ms", "ours ms", 3),
    Heading("ratio", "ratio", 3),
    Heading("clock", "clock"),
)


@dataclass(frozen=True)
class AllreduceCost(Study):
    """The cost of an all-reduce by tree, butterfly, ring, Rabenseifner and server: formula and clock.

    In virtual time, links have the latency and bandwidth of `network`. On `real` processes of this machine
    the formula's constants are unknown, so only the order of the algorithms is compared.
    """

    source: ClassVar[str] = "Ben-Nun & Hoefler, Demystifying parallel and distributed deep learning (2018)"

    workers: str = "2/4/16"
    kilobytes: str = "1/64/1024/8192"
    network: str = "1Gbit,100us"
    real: int = 4

    def run(self, lab: Lab) -> Findings:
        network = Network.parse(self.network)
        rows = [
            self._virtual(lab, network, name, p, size)
            for p in numbers("workers", self.workers)
            for size in numbers("kilobytes", self.kilobytes)
            for name in PUBLISHED
        ]
        measured = [
            self._measured(lab, name, size)
            for size in numbers("kilobytes", self.kilobytes)
            for name in ALGORITHMS
            if self.real > 1
        ]
        tables = [Table(f"Virtual time, {self.network}", HEADINGS, rows)]
        if measured:
            short = [heading for heading in HEADINGS if heading.key in measured[0]]
            tables.append(Table(f"{self.real} real processes on this machine", short, measured))
        return Findings(
            study="allreduce-cost",
            title="The cost of an all-reduce",
            source=self.source,
            tables=tables,
            charts=list(charts(rows)),
            claims=list(claims(rows)),
            remarks=[
                "Messages have headers, which the formulas leave out; with small vectors they matter.",
                "The server's formula has pushes and pulls one after the other. Links here carry both at "
                "once, so large vectors take less time. Small ones take more, because every message has a "
                "latency of its own.",
            ],
            settings=asdict(self),
        )

    def _virtual(self, lab: Lab, network: Network, name: str, workers: int, kilobytes: int) -> dict[str, Any]:
        row = {"algorithm": name, "workers": workers, "kilobytes": kilobytes, "clock": "virtual"}
        settings: dict[str, Any] = {"transport": "sim", "network": network, "compute": Compute()}
        taken = self._seconds(lab, name, workers, kilobytes, **settings)
        formula = PUBLISHED[name](workers, kilobytes * 1000, network.latency, 1 / network.bandwidth)
        return row | {"published_ms": 1e3 * formula, "ms": 1e3 * taken, "ratio": taken / formula}

    def _measured(self, lab: Lab, name: str, kilobytes: int) -> dict[str, Any]:
        taken = self._seconds(lab, name, self.real, kilobytes, transport="processes")
        return {
            "algorithm": name,
            "workers": self.real,
            "kilobytes": kilobytes,
            "ms": 1e3 * taken,
            "clock": "real",
        }

    def _seconds(self, lab: Lab, name: str, workers: int, kilobytes: int, **settings: Any) -> float:
        """Seconds of one all-reduce: in real time, the mean over workers of sending and waiting."""
        task = clockwork("numbers", kilobytes * 250, rows=workers * ROUNDS, batch=1)
        strategy: Strategy = Sync()
        if name == "server":
            strategy = SyncServer()
        else:
            settings["collective"] = name
        title = f"{name}, {workers} workers, {kilobytes} kB"
        result = lab.run(title, task, strategy, workers=workers, **settings)
        if settings["transport"] == "sim":
            return result.seconds / ROUNDS
        at_work: list[float] = [node["send_seconds"] + node["wait_seconds"] for node in result.nodes]
        return sum(at_work) / len(at_work) / ROUNDS


def claims(rows: list[dict[str, Any]]) -> Iterable[Claim]:
    """The formulas agree with the clock, and the fastest algorithm is the expected one."""
    largest = max(row["kilobytes"] for row in rows)
    sums = [row for row in rows if row["algorithm"] != "server" and row["kilobytes"] == largest]
    worst = max(abs(row["ratio"] - 1) for row in sums)
    yield Claim(
        f"at {largest:,} kB every algorithm takes the time of its formula within {worst:.1%} (aim 1 %)",
        worst < 0.01,
    )
    most = max(row["workers"] for row in rows)
    for size, expected in ((min(row["kilobytes"] for row in rows), "butterfly"), (largest, "rabenseifner")):
        there = [row for row in rows if row["workers"] == most and row["kilobytes"] == size]
        fastest = min((row for row in there if row["algorithm"] != "server"), key=lambda row: row["ms"])
        yield Claim(
            f"{expected} is the fastest for {size:,} kB on {most} workers; here {fastest['algorithm']}",
            fastest["algorithm"] == expected,
        )


def charts(rows: list[dict[str, Any]]) -> Iterable[Chart]:
    """Time over bytes, for the largest number of workers."""
    most = max(row["workers"] for row in rows)
    lines = []
    for name in PUBLISHED:
        mine = [row for row in rows if row["algorithm"] == name and row["workers"] == most]
        lines.append(ChartLine(name, [(row["kilobytes"], row["ms"]) for row in mine]))
        lines.append(
            ChartLine(
                f"{name}, formula", [(row["kilobytes"], row["published_ms"]) for row in mine], published=True
            )
        )
    yield Chart(
        f"{most} workers, virtual time",
        "kilobytes",
        "milliseconds of an all-reduce",
        lines,
        log_x=True,
        log_y=True,
    )
