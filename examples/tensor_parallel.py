"""BMUF between workers, tensor parallelism inside each: every process computes half of each layer.

shoal run -n 2 --group 2 examples/tensor_parallel.py
torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

GROUP = 2  # processes of a worker

dist.init_process_group("gloo")
shape = (int(os.environ["WORLD_SIZE"]) // GROUP, GROUP)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("workers", "tensor"))

pixels, classes = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes)
train, test = TensorDataset(x[:1440], y[:1440]), (x[1440:], y[1440:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
training = shoal.attach(model, optimizer, shoal.BMUF(period=10), mesh=mesh)

for _ in range(10):
    for a, b in shoal.shard(DataLoader(train, batch_size=32, shuffle=True)):  # alike in a group
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()

training.finish()
with torch.no_grad():
    right = float((model(test[0]).argmax(1) == test[1]).float().mean())
if dist.get_rank() == 0:
    print(f"test accuracy {100 * right:.1f} %")
dist.destroy_process_group()
