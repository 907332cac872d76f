"""Scripts of other frameworks, run with Shoal on several workers and without it."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

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


def weights(printed: str, word: str = "weights") -> torch.Tensor:
    return final_weights(printed, word)


def said(printed: str, word: str) -> str:
    """What follows the word on its line."""
    return next(line for line in printed.splitlines() if line.startswith(f"{word} ")).partition(" ")[2]


def assert_close(one: torch.Tensor, other: torch.Tensor, within: float = 1e-5) -> None:
    assert torch.allclose(one, other, rtol=0.0, atol=within), float((one - other).abs().max())
