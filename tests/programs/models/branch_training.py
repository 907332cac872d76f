"""A few steps of a pair model, with a worker for each branch; writes FOLDER/RANK.pt.

shoal run -n 2 branch_training.py FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.launch.drive import drive
from shoal.programs.models.branches import BranchModel, LastState, propagate

STEPS, BATCH = 5, 4


def batches():
    dice = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        a, b = F.one_hot(torch.randint(256, (2, BATCH, 140), generator=dice), 256).float()
        yield (a, b), torch.randint(2, (BATCH,), generator=dice).float()


def start():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(128, 1), nn.Flatten(0))
    model = BranchModel(LastState(256, 64), head)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train(folder):
    model, optimizer = start()
    training = shoal.attach(model, optimizer, "sync", unused="zeros")
    losses, weights = [], []
    for inputs, y in batches():
        own = [x if k % training.workers == training.rank else None for k, x in enumerate(inputs)]
        optimizer.zero_grad()
        losses.append(
            drive(propagate(training.node, model, own, y, F.binary_cross_entropy_with_logits)) or 0.0
        )
        optimizer.step()
        weights.append(flat(model))
    training.finish()
    told = {"losses": torch.tensor(losses), "weights": torch.stack(weights)}
    torch.save(told, folder / f"{training.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]))
