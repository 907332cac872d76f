"""One training loop, whole at each worker or cut over a group of processes: both print the same weights."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["whole", "fsdp", "tp", "pp", "fsdp_tp", "hybrid"])
parser.add_argument("--group", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--clip", type=float)
parser.add_argument("--codec")
parser.add_argument("--strategy", default="sync")
parser.add_argument("--even", action="store_true", help="layers that both FSDP and tensors can cut at once")
parser.add_argument("--strided", action="store_true")
parser.add_argument("--look", action="store_true", help="evaluate the common model after each epoch")
parser.add_argument("--die", type=int, default=-2, help="the process of this rank kills itself")
args = parser.parse_args()

generator = torch.Generator().manual_seed(3)
inputs = torch.randn(96, 5, generator=generator)
labels = torch.randint(3, (96,), generator=generator)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)

torch.manual_seed(0)
if args.even:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4))
else:
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))
mesh = None
if args.how != "whole":
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo")
    rows = int(os.environ["WORLD_SIZE"]) // args.group
    if args.how == "fsdp_tp":
        mesh = init_device_mesh("cpu", (rows, 2, 2), mesh_dim_names=("workers", "inside", "tensor"))
    elif args.strided:  # processes 0, 2, … are worker 0
        mesh = init_device_mesh("cpu", (args.group, rows), mesh_dim_names=("inside", "workers"))
    else:
        mesh = init_device_mesh("cpu", (rows, args.group), mesh_dim_names=("workers", "inside"))
    part = mesh["inside"].get_local_rank()


def forward_backward(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()


if args.how == "fsdp":  # uneven: 9 and 7 rows over two processes
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    own_part = forward_backward

    def forward_backward(x, y):
        own_part(x.chunk(args.group)[part], y.chunk(args.group)[part])

elif args.how == "fsdp_tp":
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["inside"])
    own_part = forward_backward

    def forward_backward(x, y):
        own_part(x.chunk(2)[part], y.chunk(2)[part])

elif args.how == "tp":
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ColwiseParallel(use_local_output=False)  # the next layer must know that the parts are uneven
    plan = {"0": columns, "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["inside"], plan)
elif args.how == "hybrid":
    from shoal.programs.models.hybrid import Hybrid

    model = Hybrid(model[:2], model[2:], mesh["inside"])
elif args.how == "pp":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stages = [model[:2], model[2:]] if args.group == 2 else [model[:1], model[1:2], model[2:4], model[4:]]
    model = stages[part]
    group = mesh["inside"].get_group()
    stage = PipelineStage(model, part, args.group, torch.device("cpu"), group=group)
    kind = Schedule1F1B if args.microbatches >= args.group else ScheduleGPipe
    pipeline = kind(stage, args.microbatches, loss_fn=F.cross_entropy)

    def forward_backward(x, y):
        if part == 0:
            pipeline.step(x)
        elif part == args.group - 1:
            pipeline.step(target=y)
        else:
            pipeline.step()


options = {"lr": 0.05}
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), **options)
training = shoal.attach(model, optimizer, args.strategy, codec=args.codec, mesh=mesh)
if training.resumed_from is not None:
    print("resumed from", training.resumed_from)
print("worker", training.rank, "of", training.workers, "position", training.position)
step = 0
for _ in range(args.epochs):
    for x, y in shoal.shard(loader):
        optimizer.zero_grad()
        forward_backward(x, y)
        if args.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        step += 1
        if step == 5 and args.die == int(os.environ.get("RANK", -1)):
            os.kill(os.getpid(), 9)
    if args.look:
        with training.common_model(), torch.no_grad():
            model(inputs)
training.finish()


def whole(p):
    p = p.detach()
    return p.full_tensor() if hasattr(p, "full_tensor") else p


flat = torch.cat([whole(p).reshape(-1) for p in model.parameters()])
print("weights", flat.numpy().tobytes().hex())
