"""Starting jobs with mpiexec, for tests: every process is gone when they end, and so is what MPICH left."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from warm import programs

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
PATIENCE = 60.0

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpiexec"
)


@contextlib.contextmanager
def started(
    ranks: int, *line: object, warm: bool = False, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A job whose ranks run Python with these arguments; gone when the context ends.

    A `warm` one has ranks that start at once: the processes that mpiexec itself starts are others.
    """
    assert MPIEXEC is not None
    python = sys.executable
    if warm:
        programs().start()
        python = programs().python
    folders = (Path(shoal.__file__).parents[1], Path(__file__).parents[1])
    job = subprocess.Popen(
        [MPIEXEC, "-n", str(ranks), python, *map(str, line)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield job
    finally:
        job.kill()  # its ranks go with it
        job.communicate()
        remove_leftovers()


def run_job(
    ranks: int, *line: object, warm: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a job printed, and its exit code."""
    with started(ranks, *line, warm=warm, **environment) as job:
        out, err = job.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def remove_leftovers() -> None:
    """Shared memory that MPICH leaves when a job is killed, unless another job is using it."""
    found = set(Path("/dev/shm").glob("mpich_shm_*"))
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            found = {path for path in found if str(path) not in text}
    for path in found:
        path.unlink(missing_ok=True)
