"""How long a run takes to stop after a signal, what it leaves, and whether its checkpoint is there.

Each command is started anew for each signal, with checkpoints, and gets the signal when all workers train:

compare   shoal compare --strategies bmuf
server    shoal run --strategy asgd loop.py, with a server
loop      shoal run loop.py, a loop of its own around shoal.attach

All four go to the launcher's process group, as from a terminal, or from `timeout`.

    python benchmarks/stops.py [--commands compare,server,loop] [--signals SIGINT,SIGTERM,SIGHUP,SIGQUIT]
        [--workers 2,4] [--repeats 1]

seconds      from the signal until the last process of the run has ended; the longest of the repeats
code         the launcher's exit code, 128 plus the signal's number
checkpoint   whether the newest step has the state of every worker and server
left         processes after half a minute, files in the run's temporary folder, segments in /dev/shm

The last line is JSON: for each row its seconds, as "compare SIGINT 2".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

LOOP = """
import time
import torch
import shoal

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
training = shoal.attach(model, optimizer)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.005)
"""

COMMANDS = {
    "compare": "compare --task digits --strategies bmuf --epochs 100000 --runs none",
    "server": "run --strategy asgd --runs none {loop}",
    "loop": "run --strategy sync --runs none {loop}",
}

SAVES = "--checkpoint {saved} --every 10 --quiet"

START_SECONDS = 120.0
END_SECONDS = 60.0
GONE_SECONDS = 30.0


class Stop(NamedTuple):
    """What came of one signal."""

    seconds: float
    code: int | None
    has_checkpoint: bool
    left: list[str]


class Run:
    """A command under way, in a session and a temporary folder of its own."""

    def __init__(self, word: str, workers: int, folder: Path) -> None:
        (folder / "loop.py").write_text(LOOP)
        self._saved = folder / "saved"
        self._temporary = folder / "t"
        self._temporary.mkdir()
        self._nodes = workers + (word == "server")
        self._segments = set(segments())
        kind, *rest = COMMANDS[word].format(loop=folder / "loop.py").split()
        options = SAVES.format(saved=self._saved).split()
        command = [sys.executable, "-m", "shoal", kind, "-n", str(workers), *options, *rest]
        environment = {**os.environ, "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def await_training(self) -> None:
        """Wait until all have saved twice, so that none is just beginning."""
        deadline = time.monotonic() + START_SECONDS
        while len(self._whole_steps()) < 2:
            if self._process.poll() is not None or time.monotonic() > deadline:
                assert self._process.stderr is not None
                self.end()
                raise SystemExit(f"the run did not come to train: {self._process.stderr.read()}")
            time.sleep(0.05)

    def stop(self, number: int) -> Stop:
        """Send the signal to the group, and wait until nothing runs any more."""
        before, began = max(self._whole_steps()), time.monotonic()
        os.killpg(self._process.pid, number)
        try:
            code: int | None = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        deadline = time.monotonic() + GONE_SECONDS
        while self._pids() and time.monotonic() < deadline:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        whole = self._whole_steps()
        newest = max(self._saved.rglob("step-*"), key=lambda path: path.name, default=None)
        is_there = bool(whole) and newest is not None and newest.name == max(whole) >= before
        return Stop(seconds, code, is_there, self._left())

    def end(self) -> None:
        """Kill whatever still runs."""
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _whole_steps(self) -> list[str]:
        """The steps that every node has saved."""
        folders = self._saved.rglob("step-*")
        return [path.name for path in folders if len(list(path.glob("*.json"))) == self._nodes]

    def _left(self) -> list[str]:
        files = (path.name for path in self._temporary.iterdir() if not path.name.startswith("torchinductor"))
        shared = (name for name in segments() if name not in self._segments)
        return [*(f"process {pid}" for pid in self._pids()), *files, *shared]

    def _pids(self) -> list[int]:
        """The processes of the run: those that have its temporary folder."""
        mark, found = f"TMPDIR={self._temporary}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found


def segments() -> list[str]:
    """The segments of shared memory on this host."""
    folder = Path("/dev/shm")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def measure(word: str, workers: int, number: int) -> Stop:
    """Start a command, and stop it."""
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        run = Run(word, workers, Path(folder))
        try:
            run.await_training()
            return run.stop(number)
        finally:
            run.end()


def show(rows: Sequence[tuple[str, str, int, list[Stop]]]) -> None:
    """Print the table."""
    table = Table(box=None)
    for name in ("command", "signal", "workers", "seconds", "code", "checkpoint", "left"):
        table.add_column(name)
    for word, name, workers, stops in rows:
        left = [thing for stop in stops for thing in stop.left]
        codes = sorted({str(stop.code) for stop in stops})
        has_all = all(stop.has_checkpoint for stop in stops)
        seconds = f"{max(stop.seconds for stop in stops):.1f}"
        table.add_row(
            word,
            name,
            str(workers),
            seconds,
            ", ".join(codes),
            "yes" if has_all else "no",
            ", ".join(left) or "nothing",
        )
    Console().print(table)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--signals", default="SIGINT,SIGTERM,SIGHUP,SIGQUIT")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    rows = []
    for word in args.commands.split(","):
        for workers in map(int, args.workers.split(",")):
            for name in args.signals.split(","):
                stops = [measure(word, workers, signal.Signals[name]) for _ in range(args.repeats)]
                rows.append((word, name, workers, stops))
    show(rows)
    longest = {f"{word} {name} {n}": round(max(s.seconds for s in stops), 2) for word, name, n, stops in rows}
    print(json.dumps(longest))


if __name__ == "__main__":
    main()
