"""Real runs on hosts with shaped links: a task, or a script that calls attach(), a node on each host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.core.errors import WorkerFailed
from shoal.launch.audience import Audience
from shoal.launch.environment import Place
from shoal.launch.join import Access
from shoal.runs.joined_legs import LegOutcome, summarise_legs
from shoal.runs.node_process import nodes_folder
from shoal.runs.plan import Plan
from shoal.runs.plan_words import words_of
from shoal.runs.processes import gather
from shoal.runs.result import Result
from shoal.studies.host_node import FixedCrew
from shoal.studies.shaped_hosts import ShapedHosts

LONGEST_SECONDS = 600.0
"""How long a run may take, its start included."""


def run_on_hosts(hosts: ShapedHosts, plan: Plan) -> Result:
    """Train a task, each node in a process with one thread on a host of its own, and return the result."""
    plan = FixedCrew.of(plan)
    with TemporaryDirectory(prefix="shoal-") as root:
        folder = nodes_folder(plan, root)
        folder.mkdir()
        words = json.dumps(words_of(plan))
        lines = [
            [
                sys.executable,
                "-m",
                "shoal.studies.host_node",
                root,
                str(rank),
                f"{hosts.address(rank)}:0",
                words,
            ]
            for rank in range(plan.nodes)
        ]
        said = start_all(hosts, lines, [{}] * plan.nodes, Path(root))
        reports: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in said]
        data = plan.task.data()
        model, points = gather(plan, data, folder, reports, Audience(None))
    return summarise_legs(plan, plan.config(data), [LegOutcome(plan, 0.0, reports, points, model)], data)


def script_on_hosts(hosts: ShapedHosts, script: Sequence[str], place: Mapping[str, Any]) -> str:
    """Run a script in `place["nodes"]` processes, each with one thread on a host of its own.

    `place` holds fields of `Place`: nodes, strategy, strategy_options, codec. Returns what the first one
    prints.
    """
    with TemporaryDirectory(prefix="shoal-") as root:
        settings = {"launched": "shoal", "transport": "grpc", "store": root, "on_host": 1, **place}
        nodes = range(settings["nodes"])
        access = [vars(Access(listen=f"{hosts.address(rank)}:0", insecure=True)) for rank in nodes]
        places = [Place(rank, access=access[rank], **settings).to_environment() for rank in nodes]
        return start_all(hosts, [[sys.executable, *script]] * len(nodes), places, Path(root))[0]


def start_all(
    hosts: ShapedHosts, lines: Sequence[Sequence[str]], places: Sequence[Mapping[str, str]], folder: Path
) -> list[str]:
    """Run a command on each host at the same time; what they print. Raises WorkerFailed if one fails."""
    # hosts are namespaces of one machine: what they send each other must not take the way through its memory
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_SHARED_MEMORY": "0"}
    logs = [folder / f"{rank}.log" for rank in range(len(lines))]
    try:
        started = [
            hosts.start(rank, line, {**plain, **places[rank]}, logs[rank]) for rank, line in enumerate(lines)
        ]
        said = [process.communicate(timeout=LONGEST_SECONDS)[0] for process in started]
        codes = [process.returncode for process in started]
    except subprocess.TimeoutExpired:
        raise WorkerFailed(f"a run on shaped links took more than {LONGEST_SECONDS:g} s", "") from None
    finally:
        hosts.end_processes()
    for rank, code in enumerate(codes):
        if code:
            raise WorkerFailed(f"node {rank} on shaped links ended with {code}", logs[rank].read_text())
    return said
