"""Starts the processes that probe.py describes, and listens to them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PROBE_SECONDS = 25.0
"""How long a probe may be silent: it prints a line about each transport."""

START_PATIENCE = 4
"""Times as long for the first line: on a busy machine, importing torch takes a minute."""

_WORD = re.compile("[A-Za-z]{2}")


def start_probe(rank: int, folder: str) -> subprocess.Popen[str]:
    """One of the two processes that meet in `folder`."""
    return _start([sys.executable, "-m", "shoal.profiling.probe", str(rank), folder])


def start_mpi_probe(mpiexec: str) -> subprocess.Popen[str]:
    """Both processes, under mpiexec."""
    return _start([mpiexec, "-n", "2", sys.executable, "-m", "shoal.profiling.probe", "mpi"])


def _start(line: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hear(processes: Sequence[subprocess.Popen[str]]) -> tuple[dict[str, dict[str, Any]], str]:
    """The figures that the first process printed about each transport, and how that process ended."""
    try:
        heard, end = _listen(processes[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    said = [json.loads(line) for line in heard.splitlines() if line.startswith('{"transport"')]
    return {found["transport"]: found for found in said}, end


def _listen(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All that a process prints, and how it ended. It is killed if it prints nothing for too long."""
    printed = silent = 0
    while silent < (1 if printed else START_PATIENCE):
        try:
            heard, _ = process.communicate(timeout=PROBE_SECONDS)
            why = _last_words(heard) if process.returncode else ""
            return heard, f"the process that tested it ended with exit code {process.returncode}{why}"
        except subprocess.TimeoutExpired as timeout:
            before, printed = printed, len(timeout.output or b"")
            silent = silent + 1 if printed == before else 0
    process.kill()
    heard, _ = process.communicate()
    return heard, f"no answer within {silent * PROBE_SECONDS:g} s"


def _last_words(printed: str) -> str:
    """The last line that has a word and is not JSON: it often tells what went wrong."""
    words = [line.strip() for line in printed.splitlines() if not line.startswith("{") and _WORD.search(line)]
    return f"; its last line: {words[-1]}" if words else ""
