"""Workers, servers and keepers killed with SIGKILL while a model is trained: what it costs, and what is lost.

Every strategy trains twice on real processes, one run after the other: undisturbed for `--plain` minutes,
and for about `--minutes` with a kill every `--every` seconds on average. Killed processes are started again
by the launcher, as in any run. With `--seeds 3` both runs are of the same length, and made with three seeds:
then the last lines have the accuracy of both, mean and spread, to see whether kills cost any.

    python benchmarks/storm.py [--workers 4] [--every 15] [--minutes 2] [--kill workers,servers,keeper]
        [--strategies sync,bmuf,diloco,asgd] [--task digits] [--batch 32] [--lr RATE] [--plain MINUTES]
        [--transport processes] [--durability journal] [--seed 0] [--seeds 1] [--events FILE]

efficiency   samples a second with kills, as a share of those without
survivors    seconds from a worker's notice of a kill, in an average, to the end of that average; median and
             longest. Beside a server nobody waits
victim       seconds from a kill until the first step of the worker that took its place; median and longest
taking part  workers that train, on average over the run
lost, doubled  samples that should be in the model and are not, or are there twice: by the weights of all
             averages, or by what the server has counted; gossip strategies have neither

The last line is JSON: the same figures for each strategy. `--events` writes who was killed, and who trained
again when, for each strategy: docs/elastic_picture.py draws it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import shoal
from shoal.programs.tasks import TASKS

STRATEGIES = {"bmuf": "bmuf:period=8", "diloco": "diloco:period=16", "local": "local:period=8"}
"""Options of strategies whose defaults suit longer runs."""

Event = dict[str, Any]


class Storm:
    """Kills processes of the run under way, and notes when who trains again."""

    def __init__(self, kinds: set[str], every: float, seed: int) -> None:
        self.kills = 0
        self.victims: list[float] = []
        self._kinds, self._every = kinds, every
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._rage, daemon=True)
        self._missing: dict[int, float] = {}  # rank -> when it was killed
        self._steps: dict[int, int] = {}
        self._at_work: dict[int, bool] = {}
        self._began = self._last = 0.0
        self._area = 0.0  # workers at work, times seconds
        self.events: list[tuple[float, str, str]] = []  # seconds, who, and what: trains, killed or ends

    def __enter__(self) -> Storm:
        self._began = self._last = time.monotonic()
        if self._every:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._every:
            self._thread.join()
        self._note("the run", "ends")

    @property
    def taking_part(self) -> float:
        """Workers at work, on average."""
        return self._area / max(1e-9, self._last - self._began)

    def heard(self, event: Event) -> None:
        """Progress of the run."""
        if event["role"] != "worker" or "tested" in event:
            return
        now, rank = time.monotonic(), event["rank"]
        with self._lock:
            if not self._at_work:
                self._began = self._last = now
            self._area += sum(self._at_work.values()) * (now - self._last)
            self._last = now
            advances = event["step"] > self._steps.get(rank, -1) and not event.get("lost")
            works = event.get("state") not in ("dead", "joining") and not event.get("lost")
            if rank in self._missing:
                if works and "samples" in event and not event.get("fault") and advances:
                    self.victims.append(now - self._missing.pop(rank))
                    self._at_work[rank] = True
                    self._note(f"worker {rank}", "trains")
            else:
                if works and rank not in self._at_work:
                    self._note(f"worker {rank}", "trains")
                self._at_work[rank] = works
            self._steps[rank] = event["step"]

    def _note(self, who: str, what: str) -> None:
        self.events.append((time.monotonic() - self._began, who, what))

    def _rage(self) -> None:
        while not self._over.wait(self._dice.expovariate(1 / self._every)):
            if not self._at_work:
                continue
            victim = self._victim()
            if victim is None:
                continue
            with self._lock:
                self.kills += 1
                self._note(victim.name, "killed")
                if victim.name.startswith("worker"):
                    rank = int(victim.name.split()[1])
                    self._missing[rank] = time.monotonic()
                    self._at_work[rank] = False
                os.kill(victim.pid or 0, signal.SIGKILL)

    def _victim(self) -> Any:
        """A process of a kind that is to be killed; workers only while another is at work."""
        words = {"workers": "worker", "servers": "server", "keeper": "keeper"}
        wanted = [words[kind] for kind in sorted(self._kinds)]
        there = [p for p in multiprocessing.active_children() if any(word in p.name for word in wanted)]
        at_work = [rank for rank, works in self._at_work.items() if works]
        mortal = [
            p
            for p in there
            if not p.name.startswith("worker") or (int(p.name.split()[1]) in at_work and len(at_work) > 1)
        ]
        return self._dice.choice(mortal) if mortal else None


def train(
    word: str, options: argparse.Namespace, epochs: int, every: float, seed: int
) -> tuple[shoal.Result, Storm]:
    """One run, and what the storm has seen of it."""
    strategy = shoal.strategies.STRATEGIES.read(STRATEGIES.get(word, word))
    with Storm(set(options.kill.split(",")), every, seed) as storm:
        result = shoal.run(
            options.task,
            strategy,
            workers=options.workers,
            epochs=epochs,
            batch=options.batch,
            lr=options.lr,
            seed=seed,
            transport=options.transport,
            durability=options.durability if strategy.recovers == "journal" else "memory",
            tests=0,
            on_progress=storm.heard,
        )
    return result, storm


def measure(word: str, options: argparse.Namespace, samples: int) -> tuple[dict[str, Any], list[Any]]:
    """The figures of one strategy, and what happened in its first storm."""
    probe, _ = train(word, options, 4, 0.0, options.seed)
    a_minute = 60 * probe.samples_per_second / samples  # epochs
    epochs = max(4, round(options.minutes * a_minute))
    undisturbed = epochs if options.seeds > 1 else max(4, round(options.plain * a_minute))
    seeds = range(options.seed, options.seed + options.seeds)
    plain, stormy, storms = [], [], []
    for seed in seeds:
        plain.append(train(word, options, undisturbed, 0.0, seed)[0])
        result, storm = train(word, options, epochs, options.every, seed)
        stormy.append(result)
        storms.append(storm)
    counts = not shoal.strategies.STRATEGIES.read(STRATEGIES.get(word, word)).survives
    missing = [epochs * samples - result.samples for result in stormy] if counts else []
    recoveries = [s for result in stormy for node in result.nodes for s in node.get("recoveries", ())]
    return {
        "efficiency": _rate(stormy) / _rate(plain),
        "survivors_seconds": _spread(recoveries),
        "victim_seconds": _spread([s for storm in storms for s in storm.victims]),
        "taking_part": sum(storm.taking_part for storm in storms) / len(storms),
        "samples_lost": sum(max(0, m) for m in missing) if counts else None,
        "samples_doubled": sum(max(0, -m) for m in missing) if counts else None,
        "kills": sum(storm.kills for storm in storms),
        "seconds": [[result.seconds for result in results] for results in (plain, stormy)],
        "accuracy": [[result.test_accuracy for result in results] for results in (plain, stormy)],
        "loss": [[result.test_loss for result in results] for results in (plain, stormy)],
        "epochs": [undisturbed, epochs],
    }, storms[0].events


def _rate(results: list[shoal.Result]) -> float:
    """Samples a second."""
    return sum(result.samples for result in results) / sum(result.seconds for result in results)


def _spread(seconds: list[float]) -> list[float]:
    return [median(seconds), max(seconds)] if seconds else []


def _figure(values: list[float]) -> str:
    """A mean, with the lowest and highest value if there are several."""
    mean = sum(values) / len(values)
    return f"{mean:.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def show(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(title=f"{options.task}, {options.workers} workers, a kill every {options.every:g} s")
    for name in ("strategy", "kills", "efficiency", "survivors", "victim", "taking part", "lost", "doubled"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for word, row in figures.items():
        spans = [
            f"{span[0]:.1f} s, {span[1]:.1f}" if span else "-"
            for span in (row["survivors_seconds"], row["victim_seconds"])
        ]
        counts = ["-" if n is None else str(n) for n in (row["samples_lost"], row["samples_doubled"])]
        taking = f"{row['taking_part']:.2f} of {options.workers}"
        table.add_row(word, str(row["kills"]), f"{row['efficiency']:.0%}", *spans, taking, *counts)
    Console().print(table)
    for word, row in figures.items():
        without, under = map(_figure, row["accuracy"])
        print(f"accuracy of {word}: {without} without kills, {under} with")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills, on average")
    parser.add_argument("--minutes", type=float, default=2.0, help="length of the run with kills")
    parser.add_argument("--plain", type=float, help="length of the undisturbed run; by default the same")
    parser.add_argument("--kill", default="workers", help="of workers, servers, keeper; separated by commas")
    parser.add_argument("--strategies", default="sync,bmuf,diloco,asgd", help="separated by commas")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, help="learning rate; by default the task's")
    parser.add_argument("--transport", default="processes", help="processes, grpc or gloo")
    parser.add_argument("--durability", default="journal", help="of servers: journal or memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="runs with so many seeds, from --seed on")
    parser.add_argument("--events", help="a file to write who was killed, and who trained again when")
    options = parser.parse_args()
    options.plain = options.minutes if options.plain is None else options.plain
    samples = len(TASKS.make(options.task).data().x)
    figures, events = {}, {}
    for word in options.strategies.split(","):
        figures[word], events[word] = measure(word, options, samples)
        print(f"{word}: {json.dumps(figures[word])}", flush=True)
    if options.events:
        Path(options.events).write_text(json.dumps(events))
    show(figures, options)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
