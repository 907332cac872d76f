"""Synchronous SGD between workers, a pipeline inside each: every process holds one stage.

shoal run -n 2 --group 2 examples/pipeline.py
torchrun --nproc-per-node 4 examples/pipeline.py
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

GROUP, MICROBATCHES = 2, 4

dist.init_process_group("gloo")
shape = (int(os.environ["WORLD_SIZE"]) // GROUP, GROUP)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("workers", "stages"))
stage = mesh["stages"].get_local_rank()

pixels, classes = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes)
train = TensorDataset(x[:1440], y[:1440])

torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
model = whole[:2] if stage == 0 else whole[2:]
group = mesh["stages"].get_group()
pipeline = Schedule1F1B(
    PipelineStage(model, stage, GROUP, torch.device("cpu"), group=group),
    MICROBATCHES,
    loss_fn=F.cross_entropy,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
training = shoal.attach(model, optimizer, "sync", mesh=mesh)

for _ in range(10):
    # every batch of the same size: a pipeline prepares its messages once
    losses: list[torch.Tensor] = []
    for a, b in shoal.shard(DataLoader(train, batch_size=32, shuffle=True, drop_last=True)):
        optimizer.zero_grad()
        if stage == 0:
            pipeline.step(a)
        else:
            pipeline.step(target=b, losses=losses)
        optimizer.step()

training.finish()
if training.rank == 0 and stage == GROUP - 1:
    print(f"loss {float(torch.stack(losses).mean()):.3f} in the last batch")
dist.destroy_process_group()
