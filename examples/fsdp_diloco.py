"""DiLoCo between workers, FSDP inside each: no process holds the whole model.

shoal run -n 2 --group 2 examples/fsdp_diloco.py       two workers of two processes
torchrun --nproc-per-node 4 examples/fsdp_diloco.py    the same
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

GROUP = 2  # processes of a worker

dist.init_process_group("gloo")
shape = (int(os.environ["WORLD_SIZE"]) // GROUP, GROUP)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("workers", "shards"))
shards = mesh["shards"]

pixels, classes = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes)
train, test = TensorDataset(x[:1440], y[:1440]), (x[1440:], y[1440:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=shards)
fully_shard(model, mesh=shards)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
training = shoal.attach(model, optimizer, shoal.DiLoCo(period=10), mesh=mesh)

for _ in range(4):
    for a, b in shoal.shard(DataLoader(train, batch_size=32, shuffle=True)):  # alike in a group
        own = slice(shards.get_local_rank(), None, GROUP)  # FSDP averages over the parts of the batch
        optimizer.zero_grad()
        F.cross_entropy(model(a[own]), b[own]).backward()
        optimizer.step()

training.finish()
with torch.no_grad():
    right = float((model(test[0]).argmax(1) == test[1]).float().mean())
if dist.get_rank() == 0:
    print(f"test accuracy {100 * right:.1f} %")
dist.destroy_process_group()
