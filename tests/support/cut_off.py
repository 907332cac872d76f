"""A run between two hosts, in network namespaces, whose link goes down for a while or for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

import shoal
from shoal.studies.shaped_hosts import INTERFACE, ShapedHosts, ip, obstacle

START_SECONDS = 150.0  # for torch to be imported in each process, on a busy machine
LOOP = """
import sys, time
import torch
import shoal

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attachment = shoal.attach(model, optimizer)
for t in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + attachment.rank)).pow(2).mean().backward()
    optimizer.step()
    if t == 5:
        print("goes", flush=True)
    time.sleep(0.01)
attachment.finish()
print("done", flush=True)
"""


class CutOff:
    """`shoal run OPTIONS` as torchrun starts it: worker 1 on host 1, everybody else on host 0."""

    def __init__(self, folder: Path, options: str, nodes: int, steps: int) -> None:
        if (why := obstacle()) is not None:
            pytest.skip(why)
        (folder / "loop.py").write_text(LOOP)
        self._folder, self._options, self._nodes, self._steps = folder, options, nodes, steps
        self._lab = ShapedHosts(2, 12.5e6)

    def __enter__(self) -> CutOff:
        try:
            self._lab.__enter__()
        except RuntimeError as refused:  # root in a container may lack the right
            pytest.skip(str(refused))
        shared = {
            "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
            "WORLD_SIZE": str(self._nodes),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._lab.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        self.processes = [
            self._lab.start(
                int(rank == 1),
                [
                    *(sys.executable, "-m", "shoal", "run", *self._options.split()),
                    *(self._listens(rank), str(self._folder / "loop.py"), str(self._steps)),
                ],
                {**os.environ, **shared, "RANK": str(rank)},
                self._folder / f"errors-{rank}",
            )
            for rank in range(self._nodes)
        ]
        self.printed = ["" for _ in self.processes]
        self._readers = [threading.Thread(target=self._read, args=[rank]) for rank in range(self._nodes)]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
        for reader in self._readers:
            reader.join()
        self._lab.__exit__(None, None, None)

    def await_training(self) -> None:
        """Wait until both workers train."""
        deadline = time.monotonic() + START_SECONDS
        while not all("goes" in self.printed[rank] for rank in (0, 1)):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                pytest.fail(f"they do not train:\n{self.errors(0)}\n{self.errors(1)}")
            time.sleep(0.05)

    def cut(self, seconds: float | None = None) -> None:
        """Take the link of host 1 down, for so long or for ever."""
        host = self._lab._host(1)
        ip("-n", host, "link", "set", INTERFACE, "down")
        if seconds is not None:
            time.sleep(seconds)
            ip("-n", host, "link", "set", INTERFACE, "up")

    def vanish(self) -> None:
        """Host 1 is gone: nothing that it would say as its processes end comes out."""
        self.cut()
        for pid in self._lab.pids(1):
            os.kill(pid, 9)

    def ends(self, seconds: float) -> list[int | None]:
        """The exit codes, None for a process that is still there after so many seconds."""
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [p.poll() for p in self.processes]

    def errors(self, rank: int) -> str:
        return (self._folder / f"errors-{rank}").read_text()

    def _listens(self, rank: int) -> str:
        return f"--listen={self._lab.address(int(rank == 1))}" if "grpc" in self._options else "--quiet"

    def _read(self, rank: int) -> None:
        output = self.processes[rank].stdout
        assert output is not None
        for line in output:
            self.printed[rank] += line
