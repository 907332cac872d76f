"""Convolutions data-parallel, fully connected layers model-parallel (Krizhevsky 2014), inside each worker.

shoal run -n 2 --group 2 examples/hybrid.py    two workers of two processes; BMUF between them
shoal run -n 2 examples/hybrid.py              two whole workers: plain data parallelism beside it
"""

import argparse
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.programs.models.convolutional import alex_net
from shoal.programs.models.hybrid import Hybrid

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=512, help="units of a fully connected layer")
parser.add_argument("--pictures", type=int, default=512)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
GROUP = 2

dice = torch.Generator().manual_seed(0)
patterns = torch.randn(10, 3, 64, 64, generator=dice)
y = torch.randint(10, (args.pictures,), generator=dice)
x = patterns[y] + torch.randn(args.pictures, 3, 64, 64, generator=dice)

torch.manual_seed(0)
features, classifier = alex_net(classes=10, hidden=args.hidden)
if "WORLD_SIZE" in os.environ:  # which --group sets
    dist.init_process_group("gloo")
    shape = (int(os.environ["WORLD_SIZE"]) // GROUP, GROUP)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("workers", "parts"))
    model = Hybrid(features, classifier, mesh["parts"])
else:
    mesh, model = None, nn.Sequential(features, classifier)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
training = shoal.attach(model, optimizer, shoal.BMUF(period=4), mesh=mesh)

for epoch in range(args.epochs):
    for a, b in shoal.shard(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(a), b)  # a Hybrid takes its own part of the batch
        loss.backward()
        optimizer.step()
    if training.rank == 0 and training.position == 0:
        print(f"epoch {epoch}: loss {float(loss):.4f}")
training.finish()
if dist.is_initialized():
    dist.destroy_process_group()
