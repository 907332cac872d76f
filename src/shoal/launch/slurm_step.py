"""SlurmStep: what srun tells each task of a step, and the host and port at which the tasks meet."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports at which steps meet: below those that Linux hands out by itself."""


@dataclass(frozen=True)
class SlurmStep:
    """One task of a step that srun started on `hosts`. `local_tasks` of its tasks run on this host."""

    job: int
    step: int
    rank: int
    tasks: int
    local_tasks: int
    hosts: tuple[str, ...]
    own_port: int | None = None  # MASTER_PORT, if it is set

    @classmethod
    def find(cls, variables: Mapping[str, str] = os.environ) -> SlurmStep | None:
        """The task that this process is; None outside of Slurm, and in a batch script, which is no step.

        A batch script that was submitted from inside a step inherits that step's variables. Its own
        SLURM_NTASKS and SLURM_GTIDS then contradict them.
        """
        try:
            node = int(variables["SLURM_NODEID"])
            local = expand_counts(variables["SLURM_STEP_TASKS_PER_NODE"])[node]
            found = cls(
                job=int(variables["SLURM_JOB_ID"]),
                step=int(variables["SLURM_STEP_ID"]),
                rank=int(variables["SLURM_PROCID"]),
                tasks=int(variables["SLURM_STEP_NUM_TASKS"]),
                local_tasks=local,
                hosts=expand_hosts(variables["SLURM_STEP_NODELIST"]),
                own_port=int(variables["MASTER_PORT"]) if "MASTER_PORT" in variables else None,
            )
            here = len(variables["SLURM_GTIDS"].split(","))
            tasks = int(variables.get("SLURM_NTASKS", found.tasks))
        except (KeyError, ValueError, IndexError):
            return None
        return found if (here, tasks) == (local, found.tasks) else None

    @property
    def address(self) -> str:
        """The host of task 0, where all meet; the loopback address if there is no other host."""
        return self.hosts[0] if len(self.hosts) > 1 else "127.0.0.1"

    @property
    def port(self) -> int:
        """The port where all meet: the same for all tasks, and another for other jobs and steps."""
        return self.own_port or FIRST_PORT + (101 * self.job + self.step) % PORTS


def expand_hosts(short: str) -> tuple[str, ...]:
    """The host names in Slurm's short form, such as node[01-03,7],login."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", short):
        pieces = re.findall(r"\[[^\]]*\]|[^\[\]]+", entry)
        choices = [_numbers(piece[1:-1]) if piece[0] == "[" else [piece] for piece in pieces]
        hosts += map("".join, itertools.product(*choices))
    return tuple(hosts)


def expand_counts(short: str) -> tuple[int, ...]:
    """The numbers in Slurm's short form, such as 4(x2),3."""
    counts: list[int] = []
    for entry in short.split(","):
        number, _, times = entry.rstrip(")").partition("(x")
        counts += [int(number)] * int(times or 1)
    return tuple(counts)


def _numbers(ranges: str) -> list[str]:
    """The numbers in 01-03,7, as they are written."""
    found: list[str] = []
    for entry in ranges.split(","):
        first, _, last = entry.partition("-")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
