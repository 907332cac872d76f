"""Machine code of the codecs, made once before the tests: else all who need it make it at the same time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interpreter import COLD_PYTHON

ROOT = Path(__file__).parents[2]
EVERY_CODEC = "benchmarks/codec_speed.py --rounds 1 --elements 70000 --lines 1000"


@contextmanager
def kernels_compiled_meanwhile() -> Iterator[None]:
    """Every codec writes and reads a vector in another process, which Numba compiles for, and keeps that.

    Where that was done before it takes three seconds.
    """
    with subprocess.Popen(
        [COLD_PYTHON, *EVERY_CODEC.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},  # with where Numba keeps it, if the environment says that
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as compiling:
        yield
        _, errors = compiling.communicate()
    if compiling.returncode:
        raise RuntimeError(f"{EVERY_CODEC} failed:\n{errors}")
