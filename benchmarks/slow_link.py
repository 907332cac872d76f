"""Training over slow links: torch's DistributedDataParallel and Shoal's strategies side by side.

Every worker is a process with one thread in a network namespace of its own, and the links between them have
the given rate in both directions. All train the same multilayer perceptron from the same weights on the same
batches, in the same loop: one wrapped in DDP, the others attached to Shoal, all over gloo. Seconds are those
of the slowest worker, from the word to go to the merged model; bytes are what the kernel counted at its
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
import copy
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from namespaces import INTERFACE, Lab, obstacle, undisturbed
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F

import shoal
from shoal.codecs import CODECS
from shoal.launch.control import leave_with_parent
from shoal.programs.tasks import TASKS
from shoal.replicas.module import Batches
from shoal.report.units import bytes_text, ratio_text, seconds_text
from shoal.runs.evaluation import evaluate
from shoal.sim import Network
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy

DDP = "ddp"
POWER_SGD = "powersgd"
BUCKET = 64  # MB: the whole model, or torch's PowerSGD mixes up the sums of several buckets over gloo
EVERY_STEP: dict[str, Any] = {"lr": 0.1, "sgd_momentum": 0.9}
TUNED: dict[str, dict[str, Any]] = {  # found by a search for the defaults below; all others have EVERY_STEP
    "bmuf": {"lr": 0.25, "sgd_momentum": 0.5, "momentum": 0.4, "warmup": 0, "reset_momentum": "false"},
    "sync+dgc": {"lr": 0.1, "sgd_momentum": 0.0},  # the codec has the momentum
    "diloco": {"lr": 0.25, "sgd_momentum": 0.5, "momentum": 0.5, "rate": 0.9, "warmup": 0},
}
PORT = 29500  # where the workers meet; every namespace has all its ports to itself
STARTING_SECONDS = 180.0  # that workers may take to load the data and to meet
ALONE_STEPS = 5  # by which computing without exchange is measured
REPORT_SECONDS = 0.5  # between two reports of a worker
LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal
SUMMARY = ("seconds", "accuracy", "step")
STAT = Path("/proc/stat")


# -- what is tried ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One training, as all its workers are told of it."""

    word: str  # DDP, or a strategy of Shoal's; a codec may follow behind a plus sign
    options: dict[str, Any]  # of that strategy
    lr: float
    sgd_momentum: float  # of the workers' own optimizers
    task: str
    hidden: int
    batch: int
    steps: int
    workers: int
    seed: int
    timeout: float

    @property
    def strategy(self) -> Strategy | None:
        """None for DDP."""
        return None if self.kind == DDP else STRATEGIES.make(self.kind, **self.options)

    @property
    def kind(self) -> str:
        """The word without its codec."""
        return self.word.partition("+")[0]

    @property
    def codec(self) -> str:
        """That of Shoal's strategy, or of a hook for DDP."""
        return self.word.partition("+")[2] or "none"

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return int(getattr(self.strategy, "period", 1))

    @property
    def nodes(self) -> int:
        """Processes in all, servers included."""
        return self.workers + (self.strategy.servers if self.strategy else 0)

    @property
    def samples(self) -> int:
        """Samples that all workers take together."""
        return self.steps * self.batch * self.workers


def trials(options: argparse.Namespace) -> list[Trial]:
    """One for each word. Raises ValueError where something does not fit."""
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
            trial.strategy.check(trial.workers)
        made.append(trial)
    return made


def mlp(inputs: int, hidden: int) -> nn.Module:
    """Two hidden layers; 10,004,950 parameters for 784 inputs and 2,790 hidden units."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


# -- a worker -------------------------------------------------------------------------------------------


class Loop:
    """A training loop as a user writes it; the learning rate falls in a straight line to nothing."""

    def __init__(self, trial: Trial, model: nn.Module, batches: Batches) -> None:
        self._steps, self._model, self._batches = trial.steps, model, batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr, momentum=trial.sgd_momentum)

    def train(self, steps: int) -> Iterator[float]:
        """Takes a step for each of the seconds it yields: those which that step took."""
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / self._steps)
        for _ in range(steps):
            began = time.perf_counter()
            x, y = self._batches.next()
            self.optimizer.zero_grad()
            F.cross_entropy(self._model(x), y).backward()
            self.optimizer.step()
            schedule.step()
            yield time.perf_counter() - began


def with_hook(model: nn.parallel.DistributedDataParallel, codec: str) -> nn.Module:
    """DDP with torch's own PowerSGD, or with a codec of Shoal's."""
    if codec == POWER_SGD:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif codec != "none":
        model.register_comm_hook(None, shoal.comm_hook(codec))
    return model


def work(trial: Trial) -> None:
    """The process of one worker: says when it is ready, trains when told to, and reports."""
    leave_with_parent()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    task = TASKS.make(trial.task)
    data = task.data()
    torch.manual_seed(trial.seed)
    model = mlp(data.x.shape[1], trial.hidden)

    def loop_for(module: nn.Module) -> Loop:
        cut = {"batch": trial.batch, "rank": rank, "workers": trial.workers, "seed": trial.seed}
        return Loop(trial, module, Batches(data.x, data.y, **cut))

    alone = list(loop_for(copy.deepcopy(model)).train(1 + ALONE_STEPS))[1:]
    finish: Callable[[], object]
    if trial.strategy is None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=trial.timeout))
        loop = loop_for(
            with_hook(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET), trial.codec)
        )
        finish = dist.barrier  # DDP's models are the same after every step
    else:
        loop = loop_for(model)
        finish = shoal.attach(model, loop.optimizer, trial.strategy, codec=trial.codec).finish
    say(ready=True)
    if sys.stdin.readline() != "go\n":
        return
    measured = run_loop(loop, trial.steps, finish)
    if trial.strategy is None:
        dist.destroy_process_group()
    if rank == 0:
        score = evaluate(model, task, data)
        measured["test_loss"], measured["accuracy"] = score.loss, score.accuracy
        measured["parameters"] = sum(p.numel() for p in model.parameters())
    say(done=measured, alone=median(alone))


def run_loop(loop: Loop, steps: int, finish: Callable[[], object]) -> dict[str, Any]:
    """Train, with a word now and then about how it goes; what was measured."""
    began, computed, before = time.perf_counter(), time.process_time(), bytes_sent()
    told, seconds = began, []
    for step, took in enumerate(loop.train(steps), 1):
        seconds.append(took)
        if (now := time.perf_counter()) - told > REPORT_SECONDS:
            told = now
            say(step=step, seconds=now - began, sent=bytes_sent() - before)
    finish()
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - computed,
        "bytes_sent": bytes_sent() - before,
        "step_seconds": seconds,
    }


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def bytes_sent() -> int:
    """What left this namespace's interface so far, all headers included."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


# -- the one that starts them ---------------------------------------------------------------------------


class Crew:
    """The worker processes of one trial, and what they say. Silence for too long is an error."""

    def __init__(self, lab: Lab, trial: Trial, folder: Path) -> None:
        self._trial = trial
        self._logs = [folder / f"{trial.word}-{rank}.log" for rank in range(trial.nodes)]
        self._said: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._processes = []
        for rank, log in enumerate(self._logs):
            told = ["--worker", json.dumps(asdict(trial))]
            process = lab.start(
                rank,
                [sys.executable, str(Path(__file__).resolve()), *told],
                environment(lab, trial, rank),
                log,
            )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process.stdout), daemon=True).start()

    def see_through(self, tell: Callable[[str], None]) -> tuple[list[dict[str, Any]], float]:
        """Start them together and wait for the end; what each worker has measured, and what others took."""
        tell(f"{self._trial.word}: loading and meeting")
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
        """All that is said until every worker has said that word."""
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
                    f"{self._trial.word}: worker {silent} said nothing for {timeout:g} s\n{self._log(silent)}"
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


def environment(lab: Lab, trial: Trial, rank: int) -> dict[str, str]:
    """What torchrun would leave to a process on a host of its own."""
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


def measure(lab: Lab, trial: Trial, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run one trial, and sum up what its workers say."""
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
    """Seconds of a step without exchange, and what an exchange adds to one, with the wait for others."""
    seconds: list[float] = worker["step_seconds"]
    merging = seconds[period - 1 :: period]
    rest = [took for step, took in enumerate(seconds, 1) if step % period]
    computing = median(rest) if rest else float(worker["alone_seconds"])
    return computing, median(merging) - computing if merging else float("nan")


class Load:
    """What the machine does from now on."""

    def __init__(self) -> None:
        self._wall, self._busy = time.perf_counter(), busy_seconds()

    def of_others(self, own_seconds: float) -> float:
        """The share of all cores that was taken by programs other than those who took these seconds."""
        wall, busy = time.perf_counter() - self._wall, busy_seconds() - self._busy
        return max(0.0, busy - own_seconds) / (wall * (os.cpu_count() or 1))


def busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine was started."""
    user, nice, system, _idle, _iowait, *rest = map(int, STAT.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class Teller:
    """One line that is written over on a terminal; elsewhere a line every ten seconds."""

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
        """Make room for what follows."""
        if self._terminal:
            self("")


# -- what came of it ------------------------------------------------------------------------------------


def show(results: dict[str, dict[str, Any]], trial: Trial, rate: str) -> None:
    parameters = results[trial.word]["parameters"]
    wire = 4 * parameters / Network.parse(rate).bandwidth
    table = Table(
        title=f"{trial.task}, {parameters:,} parameters, {trial.workers} workers, links of {rate}",
        caption=f"{trial.samples:,} samples: {trial.steps} steps of {trial.batch} a worker. rate, momentum: "
        f"of the workers' SGD. A model takes at least {wire:.3g} s on the wire; exchange: what it adds to a "
        f"step. others: the share of the machine that other programs took; its load was {load_of(results)}.",
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
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a Trial, for a worker process
    options = parser.parse_args(arguments)
    if min(options.workers, options.batch, options.period, options.hidden, options.samples) < 1:
        parser.error("workers, batch, period, hidden and samples are at least 1")
    return options


def run_all(options: argparse.Namespace, chosen: list[Trial], results: dict[str, dict[str, Any]]) -> None:
    """Fill in the results one after the other."""
    tell = Teller()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        rate = Network.parse(options.rate).bandwidth
        lab = stack.enter_context(Lab(max(trial.nodes for trial in chosen), rate))
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
    if options.worker:
        work(Trial(**json.loads(options.worker)))
        return
    if (why := obstacle()) is not None:
        raise SystemExit(f"slow_link.py: {why}")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has us ignore it
    results: dict[str, dict[str, Any]] = {}
    chosen: list[Trial] = []
    try:
        chosen = trials(options)
        TASKS.make(options.task).data()  # where it is missing, say so before anything starts
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
