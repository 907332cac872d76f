"""A loop whose gradients travel in parts. A worker kills itself while its back-propagation still runs.

Every worker prints the samples of each step that was done, and its final weights.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.collectives.native import Merged
from shoal.launch.environment import Place
from shoal.replicas import watch

SAMPLES, WIDTH, BATCH, EPOCHS, RATE, MOMENTUM = 60, 8, 4, 6, 0.1, 0.5


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main() -> None:
    folder, (victim, last) = Path(sys.argv[1]), map(int, sys.argv[2].split(":"))
    watch.PART_BYTES = 1
    me, model, x, handed = Place.find(), built(), data(), []
    if me.incarnation:
        (folder / "starts").touch()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    ready = Merged.ready
    Merged.ready = lambda self, part: (handed.append(part), ready(self, part))
    training = shoal.attach(model, optimizer, "sync")

    def perish(gradient: torch.Tensor) -> None:
        """Half of the parts are under way here."""
        if (me.rank, training.engine.t) == (victim, last) and not me.incarnation:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model[2].weight.register_hook(perish)
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True)
    early = 0
    for _ in range(EPOCHS):
        for (ids,) in shoal.shard(loader):
            while (folder / "died").exists() and not (folder / "starts").exists():
                time.sleep(0.02)
            time.sleep(0.05)
            optimizer.zero_grad()
            handed.clear()
            F.mse_loss(model(x[ids]), x[ids]).backward()
            early += len(handed)
            step = training.engine.t
            optimizer.step()
            print(f"did {step} {ids.tolist()}", flush=True)
    training.finish()
    print(f"early {early}")
    print("weights " + weights(model).numpy().tobytes().hex())


if __name__ == "__main__":
    main()
