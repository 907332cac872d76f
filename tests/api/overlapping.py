"""A loop that does all that makes it hard to hand gradients over early; each worker checks what comes out."""

import copy
import json

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.collectives.native import Merged
from shoal.replicas import watch

STEPS, WORKERS, WIDTH = 16, 2, 8


class Net(nn.Module):
    """Four layers; the third is left out in some steps, and the last is the first once more."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, skip):
        x = torch.tanh(self.layers[0](x))
        x = torch.tanh(self.layers[1](x))
        x = x if skip else torch.tanh(self.layers[2](x))
        return self.layers[0](x)


def passes(step: int, rank: int) -> int:
    """How many batches make up a step: two from step 4 on, and three at one worker in step 7."""
    return 1 if step < 4 else 3 if (step, rank) == (7, 1) else 2


def batches(step: int, rank: int):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for _ in range(passes(step, rank)):
        samples = 3 + rank  # the workers do not weigh the same
        yield torch.randn(samples, WIDTH, generator=generator)


def back_propagate(model: nn.Module, step: int, rank: int, saw=lambda samples: None) -> int:
    """Leave a step's gradients at the model; the samples behind them."""
    total = 0
    for x in batches(step, rank):
        saw(len(x))
        F.mse_loss(model(x, skip=step in (2, 9)), x).backward()
        total += len(x)
    if step >= 11 and rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return total


def expected(model: nn.Module) -> torch.Tensor:
    """One machine that does the work of both."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for step in range(STEPS):
        gradients, counts = [], []
        for rank in range(WORKERS):
            model.zero_grad()
            counts.append(back_propagate(model, step, rank))
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            gradients.append([g.clone() for g in grads])
        for number, p in enumerate(model.parameters()):
            weighted = sum(n * g[number] for n, g in zip(counts, gradients, strict=True))
            p.grad = weighted / sum(counts)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main() -> None:
    watch.PART_BYTES = 1
    torch.manual_seed(0)
    model = Net()
    single = copy.deepcopy(model)
    told, early, ready = [], [], Merged.ready
    Merged.ready = lambda self, part: (told.append(part), ready(self, part))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    with shoal.attach(model, optimizer, "sync", unused="zeros") as training:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            told.clear()
            back_propagate(model, step, training.rank, training.saw)
            early.append(len(told))  # parts that were on their way before the step
            optimizer.step()
    ours = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    worst = (ours - expected(single)).abs().max().item()
    print(json.dumps({"rank": training.rank, "worst": worst, "early": early}), flush=True)


if __name__ == "__main__":
    main()
