"""torchft 0.2.0 under the same storm as benchmarks/storm.py: replicas killed with SIGKILL, and started again.

It trains the same model on the same data with the same batches, undisturbed for `--plain` minutes and with a
kill every `--every` seconds on average for `--minutes`. A killed replica is started again at once. torchft's
waits are set to `--wait` seconds instead of its default of 60, with which a storm never ends.

    python benchmarks/storm_torchft.py [--workers 4] [--every 15] [--minutes 2] [--plain MINUTES]
        [--modes sync,diloco] [--task digits] [--batch 32] [--lr RATE] [--wait 5] [--seed 0]

`sync` is its DistributedDataParallel, `diloco` its DiLoCo with a period of 16. Columns are those of storm.py;
*survivors* is here the longest time without a commit of any other replica in the ten seconds after a kill. A
sample counts when the step that it is of is committed. torchft keeps no books of its data, so that lost and
doubled cannot be said.

Needs torchft (pip install torchft==0.2.0). The last line is JSON: the figures of each mode.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

PERIOD = 16
"""Local steps between two averages of DiLoCo."""

AFTERMATH = 10.0
"""Seconds after a kill in which the survivors may come to a standstill; longer ones count as this."""


def replica(options: argparse.Namespace) -> None:
    """Train until the end of the process; say every commit in a line."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft.ddp import DistributedDataParallel
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    from shoal.programs.tasks import TASKS

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    task = TASKS.make(options.task)
    data = task.data()
    model = task.model()
    rate = options.lr or task.lr
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict(), "outer": outer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        outer.load_state_dict(state["outer"])

    wait = timedelta(seconds=options.wait)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=options.mode == "sync",
        timeout=wait,
        quorum_timeout=4 * wait,
        connect_timeout=wait,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica_{options.replica}_",
        hostname="localhost",
    )
    dice = torch.Generator().manual_seed(options.seed + options.replica)

    def backward(net: torch.nn.Module) -> None:
        picked = torch.randint(len(data.x), (options.batch,), generator=dice)
        task.loss(net(data.x[picked]), data.y[picked]).backward()  # type: ignore[no-untyped-call]

    done = 0
    if options.mode == "sync":
        managed = DistributedDataParallel(manager, model)
        stepper = OptimizerWrapper(manager, optimizer)
        while True:
            stepper.zero_grad()
            backward(managed)
            stepper.step()
            done = _say(manager, done, options.batch)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=PERIOD, pin_memory=False):
        while True:
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            done = _say(manager, done, PERIOD * options.batch)


def _say(manager: Any, done: int, samples: int) -> int:
    """Say it if the manager has committed a step; the number of its last step."""
    step = manager.current_step()
    if step > done and manager.is_participating():
        print(samples, flush=True)
    return int(step)


class Replicas:
    """The replicas of one run, and what they have said."""

    def __init__(self, mode: str, options: argparse.Namespace) -> None:
        from torchft.coordination import LighthouseServer

        self.commits: list[tuple[float, int, int]] = []  # when, which replica, samples
        self.kills: list[tuple[float, int]] = []
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000
        )
        self._address = f"http://127.0.0.1:{self._lighthouse.address().rsplit(':', 1)[1]}"
        self._mode, self._options = mode, options
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._is_over = False
        for number in range(options.workers):
            self._start(number)

    def rage(self, seconds: float, every: float) -> None:
        """Let them train for that long, with kills if `every` is not 0."""
        dice = random.Random(self._options.seed)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            pause = dice.expovariate(1 / every) if every else left
            time.sleep(min(left, pause))
            if pause < left:
                self._kill(dice.randrange(self._options.workers))

    def wait_for_all(self) -> None:
        """Until each has committed something, and says so if one has died."""
        while len({number for _, number, _ in self.commits}) < self._options.workers:
            time.sleep(0.1)
            dead = [n for n, process in self._processes.items() if process.poll() is not None]
            if dead:
                raise SystemExit(f"replica {dead[0]} has ended before it trained")

    def close(self) -> None:
        """End all."""
        self._is_over = True
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._lighthouse.shutdown()

    def _kill(self, number: int) -> None:
        self.kills.append((time.monotonic(), number))
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(self._processes[number].pid, signal.SIGKILL)

    def _start(self, number: int) -> None:
        o = self._options
        command = [sys.executable, __file__, "--replica", str(number), "--mode", self._mode]
        command += ["--lighthouse", self._address, "--task", o.task, "--batch", str(o.batch)]
        command += ["--wait", str(o.wait), "--seed", str(o.seed), *(["--lr", str(o.lr)] if o.lr else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._processes[number] = process
        threading.Thread(target=self._listen, args=(number, process), daemon=True).start()

    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        """Note its commits; start it again when it ends, killed or not."""
        assert process.stdout is not None
        for line in process.stdout:
            self.commits.append((time.monotonic(), number, int(line)))
        process.wait()
        if not self._is_over:
            self._start(number)


def run(mode: str, options: argparse.Namespace, minutes: float, every: float) -> dict[str, Any]:
    """Samples a second of one run, and how long survivors and victims took."""
    replicas = Replicas(mode, options)
    try:
        replicas.wait_for_all()
        began = time.monotonic()
        replicas.rage(60 * minutes, every)
        ended = time.monotonic()
    finally:
        replicas.close()
    counted = [commit for commit in replicas.commits if began <= commit[0] < ended]
    survivors, victims = [], []
    for killed, number in replicas.kills:
        after = [(at - killed, who) for at, who, _ in counted if at > killed]
        others = [0.0, *(s for s, who in after if who != number and s < AFTERMATH)]
        survivors.append(max(b - a for a, b in pairwise([*others, min(AFTERMATH, ended - killed)])))
        victims += [s for s, who in after if who == number][:1]
    return {
        "rate": sum(samples for *_, samples in counted) / (ended - began),
        "survivors_seconds": [median(survivors), max(survivors)] if survivors else [],
        "victim_seconds": [median(victims), max(victims)] if victims else [],
        "kills": len(replicas.kills),
    }


def show(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    every = f"a kill every {options.every:g} s"
    table = Table(title=f"torchft: {options.task}, {options.workers} replicas, {every}")
    for name in ("mode", "kills", "efficiency", "survivors", "victim"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, row in figures.items():
        spans = [
            f"{span[0]:.1f} s, {span[1]:.1f}" if span else "-"
            for span in (row["survivors_seconds"], row["victim_seconds"])
        ]
        table.add_row(mode, str(row["kills"]), f"{row['efficiency']:.0%}", *spans)
    Console().print(table)


def storm(options: argparse.Namespace) -> None:
    """All modes, with kills and without."""
    os.environ.setdefault("RUST_LOG", "warn")  # its lighthouse writes several lines for every step
    figures = {}
    for mode in options.modes.split(","):
        plain = run(mode, options, options.plain or options.minutes, 0.0)
        figures[mode] = run(mode, options, options.minutes, options.every)
        rates = figures[mode].pop("rate"), plain["rate"]
        figures[mode] |= {"efficiency": rates[0] / rates[1], "samples_per_second": rates}
        print(f"{mode}: {json.dumps(figures[mode])}", flush=True)
    show(figures, options)
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills, on average")
    parser.add_argument("--minutes", type=float, default=2.0, help="length of the run with kills")
    parser.add_argument("--plain", type=float, help="length of the undisturbed run; by default the same")
    parser.add_argument("--modes", default="sync,diloco", help="separated by commas")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, help="learning rate; by default the task's")
    parser.add_argument("--wait", type=float, default=5.0, help="torchft's time-outs, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica is not None:
        replica(options)
    else:
        storm(options)


if __name__ == "__main__":
    main()
