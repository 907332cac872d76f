"""Workers that are groups of processes beside plain data parallelism: samples a second, and peak memory.

The same number of processes trains the same network on the same batches: whole at every worker, as pipelines
of two and of four stages, and a CNN with a large classifier as a hybrid (Krizhevsky 2014) inside two or one
worker. Strategy 'sync' between the workers. Memory is what a process needs beyond the imported libraries, and
on a GPU what it has allocated there.

    python benchmarks/groups.py [--device cpu|cuda] [--quick] [--runs blocks_whole_1,blocks_pipeline_2]

With `--device cuda` every process should have a GPU of its own. If several share one, NCCL refuses, and gloo
carries activations through host memory. The last line is JSON: for each run its samples a second and its
memory as multiples of those of plain data parallelism on the same network.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.api.script import run_script
from shoal.core.errors import WorkerFailed
from shoal.launch.environment import Place
from shoal.strategies import STRATEGIES

WORKER = Path(__file__).with_name("groups_worker.py")
PROCESSES = 4


@dataclass(frozen=True)
class Arrangement:
    """How the processes share a network."""

    net: str
    how: str
    group: int  # processes of a worker

    @property
    def word(self) -> str:
        """How the command line and the JSON call it."""
        return f"{self.net}_{self.how}_{self.group}"

    @property
    def name(self) -> str:
        """How the table calls it."""
        what = {"whole": "data parallel", "pipeline": f"{self.group} stages", "hybrid": "hybrid"}[self.how]
        return f"{what}, {PROCESSES // self.group} x {self.group}"


ARRANGEMENTS = (
    Arrangement("blocks", "whole", 1),
    Arrangement("blocks", "pipeline", 2),
    Arrangement("blocks", "pipeline", 4),
    Arrangement("alexnet", "whole", 1),
    Arrangement("alexnet", "pipeline", 2),
    Arrangement("alexnet", "hybrid", 2),
    Arrangement("alexnet", "hybrid", 4),
)


@dataclass(frozen=True)
class Measured:
    """What one arrangement needed."""

    samples_per_second: float
    memory: int  # of the process that needs most, in bytes
    parameters: int  # of the process that holds most


def measure(one: Arrangement, options: argparse.Namespace) -> Measured:
    """Run it once. Raises WorkerFailed where the devices cannot."""
    sizes = ("batch", "microbatches", "steps", "width", "depth")
    numbers = [word for name in sizes for word in (f"--{name}", str(getattr(options, name)))]
    lines: list[str] = []
    run_script(
        WORKER,
        [one.how, one.net, "--group", str(one.group), "--device", options.device, *numbers],
        workers=PROCESSES // one.group,
        strategy=STRATEGIES.make("sync"),
        place=Place(strategy="sync"),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.append(line),
        group=one.group if one.group > 1 else None,
    )
    said: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    return Measured(
        options.batch * options.steps / max(s["seconds"] for s in said),
        max(s["memory"] for s in said),
        max(s["parameters"] for s in said),
    )


def show(found: dict[Arrangement, Measured | str], options: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(
        title=f"{PROCESSES} processes on {options.device}, batches of {options.batch}",
        caption=f"workers x processes of each. The machine's load is {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores.",
    )
    for column in ("network", "arrangement", "samples/s", "peak MB of a process", "million parameters of it"):
        table.add_column(column, justify="left" if column in ("network", "arrangement") else "right")
    for one, m in found.items():
        figures = (
            (m, "", "")
            if isinstance(m, str)
            else (f"{m.samples_per_second:,.0f}", f"{m.memory / 1e6:,.0f}", f"{m.parameters / 1e6:.2f}")
        )
        table.add_row(one.net, one.name, *figures)
    Console().print(table)


def ratios(found: dict[Arrangement, Measured | str]) -> dict[str, float]:
    """For each arrangement its figures over those of data parallelism on the same network."""
    plain = {one.net: m for one, m in found.items() if one.how == "whole" and isinstance(m, Measured)}
    figures = {}
    for one, m in found.items():
        if isinstance(m, Measured) and one.net in plain and one.how != "whole":
            speed = m.samples_per_second / plain[one.net].samples_per_second
            figures[f"{one.word}_speed"] = round(speed, 3)
            figures[f"{one.word}_memory"] = round(m.memory / plain[one.net].memory, 3)
    return figures


def main() -> None:
    """Measure all arrangements, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="small networks, for two cores")
    parser.add_argument("--batch", type=int, help="samples of a step, of all workers together")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, help="timed")
    parser.add_argument("--width", type=int, help="of a fully connected layer")
    parser.add_argument("--depth", type=int, default=16, help="layers of the network of equal blocks")
    parser.add_argument("--runs", default=",".join(one.word for one in ARRANGEMENTS))
    options = parser.parse_args()
    options.batch = options.batch or (64 if options.quick else 256)
    options.steps = options.steps or (3 if options.quick else 10)
    options.width = options.width or (256 if options.quick else 2048)
    found: dict[Arrangement, Measured | str] = {}
    for one in (one for one in ARRANGEMENTS if one.word in options.runs.split(",")):
        try:
            found[one] = measure(one, options)
        except WorkerFailed as failure:
            found[one] = f"failed: {str(failure).splitlines()[0]}"
    show(found, options)
    print(json.dumps(ratios(found)))


if __name__ == "__main__":
    main()
