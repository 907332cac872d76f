"""Training over slow links: torch's DistributedDataParallel and Shoal's strategies side by side.

Every worker is a process with one thread in a network namespace of its own, and the links between them have
the given rate in both directions. All train the same multilayer perceptron from the same weights on the same
batches, in the same loop: one wrapped in DDP, the others attached to Shoal, all over gloo. Seconds are those
of the slowest worker, from the start signal to the merged model; bytes are the kernel's count at its
interface.

A codec may follow a strategy, as in sync+one_bit; ddp+powersgd is DDP with torch's own PowerSGD hook of rank
2, ddp+one_bit DDP with that codec as its hook.

    python benchmarks/slow_link.py [--rate 100mbit] [--strategies ddp,sync,bmuf,diloco] [--workers 2]
        [--samples 15360] [--period 30] [--set bmuf.lr=0.3] [--json FILE]

Needs Linux, root, and the programs `ip` and `tc` of iproute2. SHOAL_DATA names the folder that holds mnist/.

The last line is JSON: for each strategy its seconds, its test accuracy in per cent, and the median of the
seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from machine_load import Load
from rich.console import Console
from rich.table import Table
from slow_link_worker import DDP, POWER_SGD, Trial

import shoal
from shoal.codecs import CODECS
from shoal.programs.tasks import TASKS
from shoal.report.units import bytes_text, ratio_text, seconds_text
from shoal.sim import Network
from shoal.strategies import STRATEGIES
from shoal.studies.shaped_hosts import INTERFACE, ShapedHosts, obstacle, undisturbed
from shoal.vocabulary.strategy import Setting

EVERY_STEP: dict[str, Any] = {"lr": 0.1, "sgd_momentum": 0.9}
TUNED: dict[str, dict[str, Any]] = {  # found by search at the default settings; others have EVERY_STEP
    "bmuf": {"lr": 0.25, "sgd_momentum": 0.5, "momentum": 0.4, "warmup": 0, "reset_momentum": "false"},
    "sync+dgc": {"lr": 0.1, "sgd_momentum": 0.0},  # the codec has the momentum
    "diloco": {"lr": 0.25, "sgd_momentum": 0.5, "momentum": 0.5, "rate": 0.9, "warmup": 0},
}
WORKER = Path(__file__).resolve().with_name("slow_link_worker.py")
PORT = 29500  # where the workers connect; every namespace has its own ports
STARTING_SECONDS = 180.0  # limit for workers to load the data and connect
LINE_SECONDS = 10.0  # between two lines of progress without a terminal
SUMMARY = ("seconds", "accuracy", "step")


# -- trials ----------------------------------------------------------------------------------------


def trials(options: argparse.Namespace) -> list[Trial]:
    """One trial for each word. Raises ValueError for settings that do not fit together."""
    own: dict[str, dict[str, Any]] = {
        word: dict(TUNED.get(word) or TUNED.get(word.partition("+")[0], EVERY_STEP))
        for word in options.strategies
    }
    for setting in options.set:
        name, _, value = setting.partition("=")
        word, _, option = name.partition(".")
        if word not in own or not option or not value:
            raise ValueError(f"--set {setting}: write it as --set bmuf.lr=0.3, for one of --strategies")
        own[word][option] = value
    steps = options.steps or max(1, options.samples // (options.batch * options.workers))
    made = []
    for word, settings in own.items():
        lr, sgd_momentum = float(settings.pop("lr")), float(settings.pop("sgd_momentum"))
        kind, _, codec = word.partition("+")
        if codec not in ("", POWER_SGD):
            CODECS.read(codec)
        if kind != DDP and "period" in STRATEGIES.options(kind):
            settings.setdefault("period", options.period)
        trial = Trial(
            word,
            {name: str(value) for name, value in settings.items()},
            lr,
            sgd_momentum,
            options.task,
            options.hidden,
            options.batch,
            steps,
            options.workers,
            options.seed,
            options.timeout,
        )
        if trial.strategy is not None:
            trial.strategy.check(Setting(trial.workers))
        made.append(trial)
    return made


# -- starting the workers ---------------------------------------------------------------------------


class Crew:
    """The worker processes of one trial and their reports; one that is silent for too long is an error."""

    def __init__(self, lab: ShapedHosts, trial: Trial, folder: Path) -> None:
        self._trial = trial
        self._logs = [folder / f"{trial.word}-{rank}.log" for rank in range(trial.nodes)]
        self._said: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._processes = []
        for rank, log in enumerate(self._logs):
            process = lab.start(
                rank,
                [sys.executable, str(WORKER), json.dumps(asdict(trial))],
                environment(lab, trial, rank),
                log,
            )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process.stdout), daemon=True).start()

    def see_through(self, tell: Callable[[str], None]) -> tuple[list[dict[str, Any]], float]:
        """Start all workers at once and wait for them; their measurements, and the load by other programs."""
        tell(f"{self._trial.word}: loading data and connecting")
        workers = set(range(self._trial.workers))
        for _ in self._until(workers, "ready", STARTING_SECONDS):
            pass
        load = Load()
        for rank in workers:
            pipe = self._processes[rank].stdin
            assert pipe is not None
            pipe.write("go\n")
            pipe.flush()
        measured: dict[int, dict[str, Any]] = {}
        for rank, said in self._until(workers, "done", self._trial.timeout):
            if "done" in said:
                measured[rank] = {**said["done"], "alone_seconds": said["alone"]}
            elif rank == 0:
                tell(
                    f"{self._trial.word}: step {said['step']} of {self._trial.steps}, "
                    f"{said['seconds']:.0f} s, {bytes_text(said['sent'])} sent by worker 0"
                )
        busy = sum(each["processor_seconds"] for each in measured.values())
        return [measured[rank] for rank in sorted(measured)], load.of_others(busy)

    def _until(self, workers: set[int], word: str, timeout: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield reports until every worker has sent one with that key."""
        missing = set(workers)
        last_heard = dict.fromkeys(missing, time.monotonic())
        while missing:
            silent = min(missing, key=last_heard.__getitem__)
            try:
                rank, line = self._said.get(
                    timeout=max(0.01, last_heard[silent] + timeout - time.monotonic())
                )
            except queue.Empty:
                raise RuntimeError(
                    f"{self._trial.word}: worker {silent} sent nothing for {timeout:g} s\n{self._log(silent)}"
                ) from None
            if line is None:
                if rank in missing:
                    raise RuntimeError(f"{self._trial.word}: worker {rank} ended early\n{self._log(rank)}")
                continue
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            last_heard[rank] = time.monotonic()
            if word in said:
                missing.discard(rank)
            yield rank, said

    def _listen(self, rank: int, pipe: Iterator[str]) -> None:
        for line in pipe:
            self._said.put((rank, line))
        self._said.put((rank, None))

    def _log(self, rank: int) -> str:
        return "\n".join(self._logs[rank].read_text().splitlines()[-20:])


def environment(lab: ShapedHosts, trial: Trial, rank: int) -> dict[str, str]:
    """The environment that torchrun would give to a process on a host of its own."""
    return {
        **{name: value for name, value in os.environ.items() if name != "SHOAL_PLACE"},
        "RANK": str(rank),
        "WORLD_SIZE": str(trial.nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


def measure(lab: ShapedHosts, trial: Trial, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run one trial, and summarise the reports of its workers."""
    load = os.getloadavg()[0]
    try:
        workers, others = Crew(lab, trial, folder).see_through(tell)
    finally:
        with undisturbed():
            lab.end_processes()
    seconds = max(w["seconds"] for w in workers)
    computing, exchange = cost_of_a_step(workers[0], trial.period)
    return {
        "parameters": workers[0]["parameters"],
        "lr": trial.lr,
        "sgd_momentum": trial.sgd_momentum,
        "options": trial.options,
        "period": trial.period,
        "seconds": seconds,
        "samples_per_second": trial.samples / seconds,
        "accuracy": workers[0]["accuracy"],
        "test_loss": workers[0]["test_loss"],
        "bytes_sent": [w["bytes_sent"] for w in workers],
        "step": median(workers[0]["step_seconds"]),
        "computing_seconds": computing,
        "exchange_seconds": exchange,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "others": others,
    }


def cost_of_a_step(worker: dict[str, Any], period: int) -> tuple[float, float]:
    """Seconds of a step without exchange, and the seconds that an exchange adds, waiting included."""
    seconds: list[float] = worker["step_seconds"]
    merging = seconds[period - 1 :: period]
    rest = [took for step, took in enumerate(seconds, 1) if step % period]
    computing = median(rest) if rest else float(worker["alone_seconds"])
    return computing, median(merging) - computing if merging else float("nan")


class Teller:
    """Progress: one line that is overwritten on a terminal; elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, line: str) -> None:
        if self._terminal:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._terminal:
            self("")


# -- results ------------------------------------------------------------------------------------


def show(results: dict[str, dict[str, Any]], trial: Trial, rate: str) -> None:
    parameters = results[trial.word]["parameters"]
    wire = 4 * parameters / Network.parse(rate).bandwidth
    table = Table(
        title=f"{trial.task}, {parameters:,} parameters, {trial.workers} workers, links of {rate}",
        caption=f"{trial.samples:,} samples: {trial.steps} steps of {trial.batch} a worker. rate, momentum: "
        f"of the workers' SGD. A model takes at least {wire:.3g} s on the wire; exchange: what it adds to a "
        f"step. others: the share of the machine that other programs used; its load was {load_of(results)}.",
    )
    table.add_column("strategy")
    columns = (
        "rate",
        "momentum",
        "period",
        "seconds",
        "samples/s",
        "test acc. %",
        "sent each",
        "computing, s",
    )
    for column in (*columns, "exchange, s", "speed-up", "others"):
        table.add_column(column, justify="right")
    for word, r in results.items():
        table.add_row(
            word,
            f"{r['lr']:g}",
            f"{r['sgd_momentum']:g}",
            str(r["period"]),
            f"{r['seconds']:.1f}",
            f"{r['samples_per_second']:,.0f}",
            f"{r['accuracy']:.2f}",
            bytes_text(max(r["bytes_sent"])),
            seconds_text(r["computing_seconds"]),
            seconds_text(r["exchange_seconds"]),
            ratio_text(results[DDP]["seconds"] / r["seconds"]) if DDP in results else "–",
            f"{r['others']:.0%}",
        )
    Console(width=max(Console().width, 132)).print(table)


def load_of(results: dict[str, dict[str, Any]]) -> str:
    loads = [load for r in results.values() for load in (r["load_before"], r["load_after"])]
    return f"{min(loads):.1f} to {max(loads):.1f}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of every link, in each direction")
    parser.add_argument("--strategies", default="ddp,sync,bmuf,diloco", type=lambda text: text.split(","))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=15360, help="that all workers take together")
    parser.add_argument("--steps", type=int, help="of each worker, instead of --samples")
    parser.add_argument("--batch", type=int, default=32, help="samples a worker and step")
    parser.add_argument("--period", type=int, default=30, help="steps between exchanges, where there are any")
    parser.add_argument("--set", action="append", default=[], metavar="WORD.NAME=VALUE", help="bmuf.lr=0.3")
    parser.add_argument("--task", default="mnist", help="mnist or digits")
    parser.add_argument("--hidden", type=int, default=2790, help="units in each of two hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a step may take at most")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if min(options.workers, options.batch, options.period, options.hidden, options.samples) < 1:
        parser.error("workers, batch, period, hidden and samples are at least 1")
    return options


def run_all(options: argparse.Namespace, chosen: list[Trial], results: dict[str, dict[str, Any]]) -> None:
    """Run the trials one after the other and fill in their results."""
    tell = Teller()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        rate = Network.parse(options.rate).bandwidth
        lab = stack.enter_context(ShapedHosts(max(trial.nodes for trial in chosen), rate))
        for trial in chosen:
            results[trial.word] = r = measure(lab, trial, folder, tell)
            tell.clear()
            took = f"{r['seconds']:.1f} s, {r['accuracy']:.2f} %, {bytes_text(max(r['bytes_sent']))} sent"
            print(f"{trial.word}: {took}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=2) + "\n")


def stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    options = parse()
    if (why := obstacle()) is not None:
        raise SystemExit(f"slow_link.py: {why}")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    results: dict[str, dict[str, Any]] = {}
    chosen: list[Trial] = []
    try:
        chosen = trials(options)
        TASKS.make(options.task).data()  # report missing data before anything starts
        run_all(options, chosen, results)
    except (ValueError, RuntimeError, shoal.ShoalError) as error:
        raise SystemExit(f"slow_link.py: {error}") from None
    except KeyboardInterrupt:
        print("slow_link.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if results:
            show(results, chosen[0], options.rate)
    print(json.dumps({word: {name: round(r[name], 4) for name in SUMMARY} for word, r in results.items()}))


if __name__ == "__main__":
    main()
