"""Machine code of the codecs, made once before the tests: else all who need it make it at the same time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from interpreter import COLD_PYTHON

ROOT = Path(__file__).parents[2]
EVERY_CODEC = "benchmarks/codec_speed.py --rounds 1 --elements 70000 --lines 1000"

_compiling: list[subprocess.Popen[str]] = []


def begin_to_compile_kernels() -> None:
    """Let every codec write and read a vector in another process: Numba compiles for that and keeps the code.

    Where it has kept that code already, this takes three seconds.
    """
    _compiling.append(
        subprocess.Popen(
            [COLD_PYTHON, *EVERY_CODEC.split()],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": "src",
            },  # and where Numba keeps it, if that is set
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def await_compiled_kernels() -> None:
    """Return at once if nothing is being compiled. Raises RuntimeError if compiling failed."""
    while _compiling:
        with _compiling.pop() as process:
            _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{EVERY_CODEC} failed:\n{errors}")
