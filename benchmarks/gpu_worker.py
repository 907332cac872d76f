"""The script that gpu.py runs: a GPT of 124 M parameters on random symbols, alone or as one of two workers.

Every process prints a line of JSON: its rank, the milliseconds of each timed step, and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.programs.models.language import LanguageModel, Sizes

GPT = Sizes(symbols=50257, context=1024, width=768, heads=12, layers=12)
SMALL = Sizes(symbols=512, context=64, width=64, heads=2, layers=2)
WARM_UP = 5  # steps
ROUNDS = 5


def trained(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and one step of training without a word to Shoal."""
    torch.manual_seed(0)
    sizes, device = SMALL if options.small else GPT, torch.device(options.device)
    model = LanguageModel(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    symbols = torch.randint(sizes.symbols, (options.batch, sizes.context + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(symbols[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), symbols[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, optimizer, step


def milliseconds(step: Callable[[], None], steps: int, device: str) -> list[float]:
    """How long each of these steps takes, until the device has done it."""
    found = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def unbroken(step: Callable[[], None], steps: int, device: str) -> float:
    """Milliseconds a step, if the host runs ahead of the device as it does in training."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / steps


def allocated(device: str) -> float:
    """Peak gigabytes since the last call."""
    if device != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def alternate(options: argparse.Namespace) -> dict[str, float]:
    """The same training plain and attached, in turns: times and peak memory of attached over plain."""
    _, _, plain = trained(options)
    unbroken(plain, WARM_UP, options.device)
    allocated(options.device)
    unbroken(plain, 1, options.device)
    alone = allocated(options.device)
    held = torch.cuda.memory_allocated() / 1e9 if options.device == "cuda" else 0.0
    model, optimizer, attached = trained(options)
    run = shoal.attach(model, optimizer)
    unbroken(attached, WARM_UP, options.device)
    allocated(options.device)
    unbroken(attached, 1, options.device)
    extra = allocated(options.device) - held - alone
    plain_ms, attached_ms = [], []
    for _ in range(ROUNDS):
        plain_ms.append(unbroken(plain, options.steps, options.device))
        attached_ms.append(unbroken(attached, options.steps, options.device))
    run.finish()
    ratios = [b / a for a, b in zip(plain_ms, attached_ms, strict=True)]
    return {
        "plain_ms": statistics.median(plain_ms),
        "attached_ms": statistics.median(attached_ms),
        "attach_over_plain": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "extra_gigabytes": extra,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument(
        "--alternate", action="store_true", help="plain and attached in turns, in one process"
    )
    options = parser.parse_args()
    if options.alternate:
        print(json.dumps(alternate(options)), flush=True)
        return
    model, optimizer, step = trained(options)
    run = shoal.attach(model, optimizer)
    milliseconds(step, WARM_UP, options.device)
    times = milliseconds(step, options.steps, options.device)
    run.finish()
    print(json.dumps({"rank": run.rank, "ms": times, "gigabytes": allocated(options.device)}), flush=True)


if __name__ == "__main__":
    main()
