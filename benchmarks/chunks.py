"""The effect of context-sensitive chunks: a DBLSTM trained on whole sequences, and on chunks of them.

Both sides start from the same weights, see every frame once per epoch, and take the same number of steps on
about as many labelled frames. Their epochs alternate in one process, so that the ratio of their times is
taken in one run: processor time on a CPU, wall time on a GPU.

    python benchmarks/chunks.py [--chunks 21-64+21] [--connected 10] [--batch 4] [--epochs 6] [--seeds 0,1,2]
        [--layers 2] [--width 64] [--lr 0.2] [--device cpu] [--threads 1] [--json FILE]

SHOAL_DATA in the environment names the folder that holds fsdd/fsdd.npz. Sequences are `connected` digits of
one speaker. Errors are those of the test set: decoded whole for the one side; for the other, in chunks that
overlap by half a core, and for comparison in adjacent chunks and whole. The last line is JSON: the mean frame
errors of both sides, and the time of an epoch on whole sequences over that on chunks, the median of all
epochs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shoal.core.seeds import stream
from shoal.core.task import Data, sequence_loss
from shoal.programs.models.acoustic import DBLSTM
from shoal.programs.models.chunks import Chunks, InChunks
from shoal.programs.models.padding import Padded
from shoal.programs.tasks.speech import CLASSES, MEL, METRICS, SequenceData, frame_error, momentum_sgd

AIM = 1.0  # points of frame error that chunks may be behind


@dataclass
class Side:
    """One way to train: its data and model, and the seconds of each epoch so far."""

    data: Data
    model: nn.Module
    batch: int
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)

    def epoch(self, order: torch.Generator, lr: float) -> None:
        """One pass over the samples in a fresh order."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        shuffled = torch.randperm(len(self.data.x), generator=order).to(self.data.x.device)
        self.propagate(shuffled[: self.batch])  # untimed warm-up
        began = self.now()
        for picked in torch.split(shuffled, self.batch):
            self.propagate(picked)
            self.optimizer.step()
        self.seconds.append(self.now() - began)

    def propagate(self, picked: Tensor) -> None:
        """Compute the gradients of a batch."""
        self.optimizer.zero_grad()
        sequence_loss(self.model(self.data.x[picked]), self.data.y[picked]).backward()  # type: ignore[no-untyped-call]

    def now(self) -> float:
        """The clock, after all work on the device is done."""
        if self.data.x.is_cuda:
            torch.cuda.synchronize()
            return perf_counter()
        return process_time()


def rate(lr: float, epoch: int, epochs: int) -> float:
    """The learning rate of an epoch: constant in the first half, then linear decay to a tenth."""
    return lr * (1 - 0.9 * max(0.0, 2 * (epoch + 1) / epochs - 1))


@torch.no_grad()
def errors(model: nn.Module, data: Data) -> dict[str, float]:
    """Both error rates on the test set."""
    model.eval()
    out = torch.cat([model(x) for x in torch.split(data.test_x, 100)])
    return {name: metric(out, data.test_y) for name, metric in METRICS.items()}


def net(options: argparse.Namespace, seed: int) -> DBLSTM:
    """The model with the initial weights of a seed."""
    torch.manual_seed(seed)
    return DBLSTM(MEL.bands, options.layers, options.width, CLASSES).to(options.device)


def train(options: argparse.Namespace, whole: Data, cut: Data, seed: int) -> dict[str, dict[str, float]]:
    """Both sides from the same weights: the errors of each way to decode, and the median ratio of times."""
    chunks = Chunks.parse(options.chunks)
    models = Padded(net(options, seed)), InChunks(net(options, seed), chunks, max(1, chunks.core // 2))
    steps = -(-len(whole.x) // options.batch)
    batches = options.batch, -(-len(cut.x) // steps)
    sides = [
        Side(data, model, batch, momentum_sgd(model.parameters(), lr=options.lr))
        for data, model, batch in zip((whole, cut), models, batches, strict=True)
    ]
    for epoch in range(options.epochs):
        for side in sides if epoch % 2 else reversed(sides):
            side.epoch(stream(seed, "chunks", epoch), rate(options.lr, epoch, options.epochs))
    learnt, both = models[1].model, list(zip(*(side.seconds for side in sides), strict=True))
    return {
        "whole": errors(models[0], whole),
        "chunks": errors(models[1], whole),
        "chunks, decoded side by side": errors(InChunks(learnt, chunks, chunks.core), whole),
        "chunks, decoded whole": errors(Padded(learnt), whole),
        "seconds": {
            "whole": median(a for a, _ in both),
            "chunks": median(b for _, b in both),
            "speed-up": median(a / b for a, b in both),
        },
    }


def show(found: list[dict[str, dict[str, float]]], seeds: list[int], title: str) -> dict[str, float]:
    """Print everything, and return the three figures that count."""
    table = Table("trained on", "", title=title)
    for header in (*(f"seed {seed}" for seed in seeds), "mean", "spread"):
        table.add_column(header, justify="right")
    means = {}
    for side in found[0]:
        for name in found[0][side]:
            values = [each[side][name] for each in found]
            means[side, name] = mean(values)
            table.add_row(
                side, name, *(f"{v:.2f}" for v in [*values, mean(values), max(values) - min(values)])
            )
    Console(width=110).print(table)
    name = next(name for name, metric in METRICS.items() if metric is frame_error)
    behind = means["chunks", name] - means["whole", name]
    judged = "met" if behind <= AIM else "MISSED"
    print(f"chunks are {behind:+.2f} points of frame error from whole sequences; at most {AIM}: {judged}")
    return {
        "whole": round(means["whole", name], 2),
        "chunks": round(means["chunks", name], 2),
        "speed_up": round(means["seconds", "speed-up"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chunks", default="21-64+21", help="left context, core and right context")
    parser.add_argument("--connected", type=int, default=10, help="digits of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="whole sequences; in chunks, as many frames")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", default="0,1,2", help="numbers separated by commas")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="cells of each direction")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    whole, cut = (
        SequenceData(options.connected, chunks)().on(options.device)
        for chunks in (None, Chunks.parse(options.chunks))
    )
    found = []
    for seed in seeds:
        found.append(train(options, whole, cut, seed))
        print(f"seed {seed}: {json.dumps(found[-1])}", flush=True)
    title = (
        f"DBLSTM {options.layers} x ({options.width}+{options.width}), {options.batch} sequences of "
        f"{options.connected} digits a batch, chunks {options.chunks}, "
        f"{options.epochs} epochs, lr {options.lr:g}"
    )
    figures = show(found, seeds, title)
    if options.json:
        options.json.write_text(json.dumps({"seeds": seeds, "found": found, **figures}, indent=2) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
