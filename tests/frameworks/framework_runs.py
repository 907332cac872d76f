"""Scripts of other frameworks, run with Shoal on several workers and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from forked import run_forked
from scripts import final_weights, run_loop

FOLDER = Path(__file__).with_name("scripts")


def needs(library: str, extra: str | None = None) -> pytest.MarkDecorator:
    """Skip where a library is missing, and say what installs it: an extra of ours, or its own name."""
    package = library if extra is None else f"'shoal[{extra}]'"
    return pytest.mark.skipif(
        find_spec(library) is None,
        reason=f"needs {library}: `make frameworks` runs this, or pip install {package}",
    )


def run_alone(script: str, folder: Path, **wanted: Any) -> str:
    """What the script prints that plain `python` runs."""
    done = run_forked([sys.executable, str(FOLDER / script), str(folder), json.dumps(wanted)])
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_many(
    script: str, folder: Path, *, launch: str | None = "sync", period: int | None = None, **wanted: Any
) -> list[str]:
    """What each of two workers of `shoal run` prints."""
    arguments = (str(folder), json.dumps({"strategy": launch, **wanted}))
    options = {} if period is None else {"period": str(period)}
    return run_loop(*arguments, strategy=launch, script=FOLDER / script, strategy_options=options)


@dataclass(frozen=True)
class TorchRun:
    """What torchrun's processes, one after the other, printed and complained of."""

    returncode: int
    printed: list[str]
    errors: str


def run_by_torchrun(script: str, folder: Path, **wanted: Any) -> TorchRun:
    """Two processes that torchrun starts, each with a file of its own: on one screen lines would mix."""
    log = folder / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [
            *(*command, "--nproc-per-node=2", "--redirects=3", f"--log-dir={log}"),
            *(str(FOLDER / script), str(folder), json.dumps(wanted)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])},
        check=False,
    )
    outs, errors = (sorted(log.rglob(f"{name}.log")) for name in ("stdout", "stderr"))
    return TorchRun(
        done.returncode,
        [out.read_text() for out in outs],
        "".join([done.stderr, *(error.read_text() for error in errors)]),
    )


def weights(printed: str, word: str = "weights") -> torch.Tensor:
    return final_weights(printed, word)


def said(printed: str, word: str) -> str:
    """What follows the word on its line."""
    return next(line for line in printed.splitlines() if line.startswith(f"{word} ")).partition(" ")[2]


def assert_close(one: torch.Tensor, other: torch.Tensor, within: float = 1e-5) -> None:
    assert torch.allclose(one, other, rtol=0.0, atol=within), float((one - other).abs().max())
