"""Workers with different amounts of data; each prints what it ends with."""

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import shoal

STEPS = (5, 12, 0)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with shoal.attach(model, optimizer, sys.argv[1]) as training:
        generator = torch.Generator().manual_seed(training.rank)
        for _ in range(STEPS[training.rank]):
            x = torch.randn(3 + training.rank, 4, generator=generator)
            training.saw(len(x))
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    weights = [value for p in model.parameters() for value in p.detach().reshape(-1).tolist()]
    print(json.dumps({"weights": weights, "merged": training.engine.merged}), flush=True)


if __name__ == "__main__":
    main()
