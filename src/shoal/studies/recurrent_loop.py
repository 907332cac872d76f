"""A script as a user has it, for plans: wide layers after a recurrent one, with Adam. Sends much."""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Forecaster(nn.Module):
    """A GRU over a series, and two wide layers that say its next value; 727,937 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(1, 64, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1280), nn.ReLU(), nn.Linear(1280, 1)
        )

    def forward(self, series: Tensor) -> Tensor:
        out: Tensor = self.head(self.memory(series)[0][:, -1])
        return out


def main() -> None:
    """Train for some epochs; the first worker prints how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    epochs = parser.parse_args().epochs
    waves = torch.sin(torch.arange(17) * 0.3 + torch.linspace(0, 100, 8192)[:, None])[..., None]
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loader = DataLoader(TensorDataset(waves[:, :16], waves[:, 16]), batch_size=64, shuffle=True)
    training = shoal.attach(model, optimizer)
    began = time.perf_counter()
    for _ in range(epochs):
        for x, y in shoal.shard(loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    training.finish()
    if training.rank == 0:
        print(f"took {time.perf_counter() - began:.4f} s")


if __name__ == "__main__":
    main()
