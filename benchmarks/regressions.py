"""Performance regressions: compare quick figures with the ones stored for this kind of machine.

    python benchmarks/regressions.py            measure and print
    python benchmarks/regressions.py --check    exit with status 1 if a stored figure has become slower
    python benchmarks/regressions.py --save     measure several times, also with busy cores, and store

A figure is processor time over the processor time of a calibration loop, which runs in this process right
before and right after the workload, so that a slow or busy machine slows both. Rounds visit all workloads in
turn, and a figure is the median over the rounds. benchmarks/figures.json stores each figure and its tolerance
by architecture and processor. --save measures with idle and with busy cores, and sets the tolerance to 1.5
times the largest deviation from the median. --check measures a figure that is too slow once more before it
fails.

Processor time leaves out waiting. step_time.py and parameter_server.py measure that.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median

import torch

FIGURES = Path(__file__).with_name("figures.json")
LEAST_TOLERANCE = 0.15  # the few runs of one --save may agree by chance; later runs were 13 % off
SAFETY = 1.5  # how much more than the variation seen while saving is tolerated
BUSY_LOOP = "import os\nwhile os.getppid() == {parent}: pass"  # ends with its parent, however that ends

Work = Callable[[], object]
Ratios = dict[str, float]


# -- stored figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A figure as figures.json has it."""

    ratio: float  # its processor time over that of the calibration loop
    tolerance: float  # the share by which a new ratio may exceed it
    lowest: float  # of the runs that it was taken from
    highest: float


def machine_kind() -> str:
    """The architecture and the processor, which ratios depend on."""
    return f"{platform.machine()}, {cpu_model()}"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor, as the operating system gives it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown processor"


def summarise(runs: list[Ratios]) -> dict[str, Stored]:
    """The figures to store, from several runs."""
    return {name: summarise_one([run[name] for run in runs]) for name in runs[0]}


def summarise_one(ratios: list[float]) -> Stored:
    """A figure's median, and a tolerance that covers all of these runs with room to spare."""
    middle = median(ratios)
    farthest = max(abs(ratio / middle - 1) for ratio in ratios)
    tolerance = max(LEAST_TOLERANCE, ceil(100 * SAFETY * farthest) / 100)
    return Stored(*(round(value, 4) for value in (middle, tolerance, min(ratios), max(ratios))))


def compare(stored: dict[str, Stored], measured: Ratios) -> tuple[list[str], list[str]]:
    """Sentences about figures that have become slower, and about those that have become faster or are new."""
    slower, remarks = [], []
    for name, ratio in measured.items():
        if name not in stored:
            remarks.append(f"{name} has no stored figure; run --save to store {ratio:.3f}.")
            continue
        old = stored[name]
        change = ratio / old.ratio - 1
        said = f"the stored ratio is {old.ratio:.3f}, the new one {ratio:.3f} ({change:+.0%}"
        if change > old.tolerance:
            slower.append(f"{name} has become slower: {said}, tolerance {old.tolerance:.0%}).")
        elif change < -old.tolerance:
            remarks.append(f"{name} has become faster: {said}); run --save to keep it there.")
    return slower, remarks


def load(file: Path, kind: str) -> dict[str, Stored] | None:
    """The figures stored for a kind of machine; None if there are none."""
    if not file.exists():
        return None
    entry = json.loads(file.read_text()).get(kind)
    return entry and {name: Stored(**fields) for name, fields in entry["figures"].items()}


def save(file: Path, kind: str, figures: dict[str, Stored]) -> None:
    """Store the figures of a kind of machine in place of its old ones."""
    entries = json.loads(file.read_text()) if file.exists() else {}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    entries[kind] = {**versions, "figures": {name: asdict(figure) for name, figure in figures.items()}}
    file.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n")


# -- measuring --------------------------------------------------------------------------------------------


def calibration() -> None:
    """The kinds of work that Shoal does: heaps, dictionaries, and operations on small tensors."""
    heap: list[tuple[float, int]] = []
    seen: dict[int, float] = {}
    for number in range(40_000):
        heapq.heappush(heap, (number * 7919 % 10_007, number))
        if len(heap) > 500:
            moment, first = heapq.heappop(heap)
            seen[first % 1000] = seen.get(first % 1000, 0.0) + moment
    x, g = torch.ones(1000), torch.ones(1000)
    for _ in range(6_000):
        x.add_(g, alpha=0.5).mul_(0.5)
        g = x.clone()


def processor_seconds(work: Work) -> float:
    """Processor time that this process and the ones it has started spend on some work."""
    began = clocks()
    work()
    return clocks() - began


def clocks() -> float:
    """Processor time of this process and of its live children so far."""
    linux = sys.platform == "linux"  # elsewhere this process is all that can be seen
    children = [child.pid for child in multiprocessing.active_children() if child.pid and linux]
    return time.process_time() + sum(time.clock_gettime(clock_id(pid)) for pid in children)


def clock_id(pid: int) -> int:
    """The clock of another process's processor time, by the numbering of Linux."""
    return ~pid << 3 | 2


def measure(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """The ratio of each work to the calibration loop around it, in every round; the first warms up."""
    ratios: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        before = processor_seconds(calibration)
        for name, work in works.items():
            spent = processor_seconds(work)
            after = processor_seconds(calibration)
            if number:
                ratios[name].append(2 * spent / (before + after))
            before = after
    return ratios


def medians(ratios: dict[str, list[float]]) -> Ratios:
    """Each figure, from what the rounds gave."""
    return {name: median(values) for name, values in ratios.items()}


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy with another process."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY_LOOP.format(parent=os.getpid())])
        for _ in range(multiprocessing.cpu_count())
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# -- workloads --------------------------------------------------------------------------------------------


@contextmanager
def started(names: list[str]) -> Iterator[dict[str, Work]]:
    """The workloads of these figures, ready to be called again and again."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(WORKLOADS[name]()) for name in names}


@contextmanager
def kernel_events() -> Iterator[Work]:
    """Bare timers of the simulator's kernel."""
    from simulator import sleep

    yield lambda: sleep(200_000)


@contextmanager
def easgd_1000x20() -> Iterator[Work]:
    """A whole simulation: messages to a server, a network and jitter."""
    from simulator import easgd

    yield lambda: easgd(workers=1000, steps=20)


@contextmanager
def sync_steps() -> Iterator[Work]:
    """`shoal.run` from end to end, with a model that computes next to nothing."""
    import shoal
    from shoal.studies.clockwork import clockwork

    task = clockwork("numbers", parameters=50_000, rows=4 * 100, batch=1)
    yield lambda: shoal.run(task, shoal.Sync(), workers=4, transport="sim", collective="ring")


@contextmanager
def server_round_trips() -> Iterator[Work]:
    """A worker and a parameter server in two processes, which exchange 1 MB."""
    from parameter_server import Bench

    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        bench = Bench(250_000, folder)
        bench.add_server("shm", "processes")

        def work() -> None:
            for _ in range(100):
                bench.visits["shm pull"]()
                bench.visits["shm push"]()

        try:
            yield work
        finally:
            bench.close()


@contextmanager
def codec_one_bit() -> Iterator[Work]:
    """Encode and decode with error feedback, every element."""
    yield encode_and_decode("one_bit", times=120)


@contextmanager
def codec_top_k() -> Iterator[Work]:
    """Encode and decode with error feedback, the largest elements."""
    yield encode_and_decode("top_k", times=40)


def encode_and_decode(word: str, times: int) -> Work:
    """The stream of vectors of codec_speed.py, with a vector of a million elements."""
    from codec_speed import Visit, chosen, layers

    v = 1e-3 * torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    visit = Visit(chosen([word])[word].fit(layers(len(v))), v, torch.zeros_like(v))

    def work() -> None:
        for _ in range(times):
            visit.encode()
            visit.decode()

    return work


WORKLOADS: dict[str, Callable[[], AbstractContextManager[Work]]] = {
    workload.__name__: workload
    for workload in (
        kernel_events,
        easgd_1000x20,
        sync_steps,
        server_round_trips,
        codec_one_bit,
        codec_top_k,
    )
}


# -- the command ------------------------------------------------------------------------------------------


def check(file: Path, names: list[str], rounds: int) -> int:
    """Compare new figures with the stored ones; the exit status."""
    kind = machine_kind()
    stored = load(file, kind)
    if stored is None:
        print(f"no stored figure for this machine ({kind}); run --save")
        return 0
    with started(names) as works:
        slower, remarks = compare(stored, medians(measure(works, rounds)))
        if slower:  # measure once more before it counts
            suspects = {name: works[name] for name in names if any(s.startswith(f"{name} ") for s in slower)}
            slower, _ = compare(stored, medians(measure(suspects, rounds)))
    print("\n".join([*slower, *remarks] or [f"Within their tolerances: {', '.join(names)}."]))
    return 1 if slower else 0


def save_all(file: Path, names: list[str], rounds: int, runs: int) -> None:
    """Measure half of the runs with a busy process on every core, half without, and store the figures."""
    measured = []
    with started(names) as works:
        for number in range(2 * runs):
            with busy_cores() if number % 2 else nullcontext():
                measured.append(medians(measure(works, rounds)))
            said = ", ".join(f"{name} {ratio:.3f}" for name, ratio in measured[-1].items())
            print(f"{'with busy cores' if number % 2 else 'without'}: {said}", flush=True)
    figures = summarise(measured)
    save(file, machine_kind(), {**(load(file, machine_kind()) or {}), **figures})
    for name, figure in figures.items():
        seen = f"{figure.lowest:.3f} to {figure.highest:.3f}"
        print(f"{name}: {figure.ratio:.3f} ({seen}), tolerance {figure.tolerance:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure is slower")
    parser.add_argument("--save", action="store_true", help="store the figures of this machine")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="figures separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of each figure in a run")
    parser.add_argument(
        "--runs", type=int, default=5, help="for --save: runs without busy cores, and as many with them"
    )
    parser.add_argument("--file", type=Path, default=FIGURES, help="where figures are stored")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown figure {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    if options.check:
        raise SystemExit(check(options.file, names, options.rounds))
    if options.save:
        save_all(options.file, names, options.rounds, options.runs)
        return
    with started(names) as works:
        ratios = measure(works, options.rounds)
    for name, values in ratios.items():
        print(f"{name:20} {median(values):8.3f}   ({min(values):.3f} to {max(values):.3f})")
    print(json.dumps({name: round(ratio, 4) for name, ratio in medians(ratios).items()}))


if __name__ == "__main__":
    main()
