"""What Shoal costs on a GPU: a step with it and without, and how long training stops for an exchange.

A GPT of 124 M parameters (498 MB) in bfloat16 autocast with fused AdamW, in your own loop. One worker
attached runs in turns with the same loop without Shoal. Then two workers share the GPU: `diloco` exchanges
every ten steps, through memory of the GPU that both have mapped and, where that is switched off, through host
memory; `streaming_diloco` exchanges fragments while it computes, beside workers that never talk; `sync`
exchanges at every step.

    python benchmarks/gpu.py [--device cuda] [--steps 40] [--batch 8] [--only attach,ipc,host,streaming,sync]

The last line is JSON: attach_over_plain, extra_gigabytes, stall_ms_ipc, stall_ms_host, streaming_slowdown and
sync_step_ms. `--device cpu --small` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

from shoal.api.script import run_script
from shoal.launch.environment import Place
from shoal.strategies import STRATEGIES
from shoal.transports.shared_memory.gpu_memory import SWITCH

WORKER = Path(__file__).with_name("gpu_worker.py")
PERIOD = 10


def arguments(options: argparse.Namespace) -> list[str]:
    """Those of the script."""
    numbers = ["--steps", str(options.steps), "--batch", str(options.batch), "--device", options.device]
    return [*numbers, *(["--small"] if options.small else [])]


def alternate(options: argparse.Namespace) -> dict[str, float]:
    """Plain and attached in turns, in one process."""
    command = [sys.executable, str(WORKER), "--alternate", *arguments(options)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    print(
        f"plain {found['plain_ms']:.2f} ms, attached {found['attached_ms']:.2f} ms: "
        f"{found['attach_over_plain']:.4f} times ({found['least']:.4f} to {found['most']:.4f}), "
        f"{found['extra_gigabytes']:+.2f} GB",
        flush=True,
    )
    return found


def steps_of(strategy: str, settings: dict[str, str], options: argparse.Namespace) -> list[list[float]]:
    """The milliseconds of each step, of both workers."""
    lines: list[str] = []
    run_script(
        WORKER,
        arguments(options),
        workers=2,
        strategy=STRATEGIES.make(strategy, **settings),
        place=Place(strategy=strategy, strategy_options=settings),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.append(line),
    )
    said: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    print(strategy, settings, *(f"{one['gigabytes']:.2f} GB" for one in said), flush=True)
    return [one["ms"] for one in said]


def stall(options: argparse.Namespace) -> float:
    """How much longer than the others the steps of `diloco` last in which workers exchange."""
    found = []
    for times in steps_of("diloco", {"period": str(PERIOD)}, options):
        inner = median(times)
        longest = sorted(times)[-(len(times) // PERIOD) :]
        found += [one - inner for one in longest]
        print(f"  inner steps {inner:.1f} ms, exchanges", [round(one - inner, 1) for one in longest])
    return median(found)


@contextlib.contextmanager
def through_host_memory() -> Iterator[None]:
    """Processes that are started inside do not map each other's memory of the GPU."""
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]


def slowdown(options: argparse.Namespace) -> float:
    """How much longer a step lasts with streaming than without any exchange, on average."""
    settings = {"period": str(2 * PERIOD), "fragments": "4", "overlap": "4"}
    streaming = mean(mean(times) for times in steps_of("streaming_diloco", settings, options))
    alone = mean(mean(times) for times in steps_of("local", {"period": "1000000"}, options))
    print(f"  {alone:.2f} ms alone, {streaming:.2f} ms with streaming")
    return streaming / alone - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--only", default="attach,ipc,host,streaming,sync")
    options = parser.parse_args()
    only = options.only.split(",")
    found: dict[str, float] = {}
    if "attach" in only:
        ratios = alternate(options)
        found |= {name: ratios[name] for name in ("attach_over_plain", "extra_gigabytes")}
    if "ipc" in only:
        found["stall_ms_ipc"] = stall(options)
    if "host" in only:
        with through_host_memory():
            found["stall_ms_host"] = stall(options)
    if "streaming" in only:
        found["streaming_slowdown"] = slowdown(options)
    if "sync" in only:
        found["sync_step_ms"] = median(chain(*steps_of("sync", {}, options)))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
