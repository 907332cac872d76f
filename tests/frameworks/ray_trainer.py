"""A TorchTrainer of Ray Train, run by the tests: ray_trainer.py STRATEGY PROCESSES FOLDER."""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import shoal
from shoal.ray import ShoalConfig


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = shoal.attach(model, optimizer)
    for step in range(config["steps"]):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + training.rank))
        optimizer.zero_grad()
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    training.finish()
    found = Path(config["folder"]) / f"{training.rank}-{training.workers}"
    found.write_text(repr([p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    strategy, processes, folder = sys.argv[1:]
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    TorchTrainer(
        train,
        train_loop_config={"steps": 30, "folder": folder},
        torch_config=ShoalConfig(strategy=strategy),
        scaling_config=ScalingConfig(num_workers=int(processes)),
        run_config=RunConfig(storage_path=f"{folder}/storage", name=strategy),
    ).fit()
