"""Scripts that call attach(), run as `shoal run` runs them."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.api.script import run_script
from shoal.launch.environment import Place
from shoal.strategies import STRATEGIES


def run_loop(
    *arguments: str,
    workers: int = 2,
    strategy: str | None = "sync",
    script: Path,
    min_workers: int = 1,
    spares: int = 0,
    max_workers: int | None = None,
    **place,
) -> list[str]:
    """What each worker printed; of a run that others may join, none of theirs."""
    lines: dict[str, list[str]] = {}
    chosen = None if strategy is None else STRATEGIES.make(strategy, **place.get("strategy_options", {}))
    run_script(
        script,
        arguments,
        workers=workers,
        strategy=chosen,
        place=Place(strategy=strategy, **place),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.setdefault(name, []).append(line),
        min_workers=min_workers,
        spares=spares,
        max_workers=max_workers,
    )
    return ["\n".join(lines.get(f"worker {rank}", ())) for rank in range(workers)]


def final_weights(printed: str, word: str = "weights") -> torch.Tensor:
    line = next(line for line in printed.splitlines() if line.startswith(f"{word} "))
    return torch.frombuffer(bytearray.fromhex(line.split()[1]), dtype=torch.float32)
