"""The script that groups.py runs: one network, whole, as a pipeline or as a hybrid, on batches of noise.

Every process prints a line of JSON: its rank, the seconds of the timed steps, and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shoal
from shoal.programs.models.convolutional import alex_net
from shoal.programs.models.hybrid import Hybrid

CLASSES = 101
WARM_UP = 2  # steps

Step = Callable[[Tensor, Tensor], None]


class AcrossHost(nn.Module):
    """A stage on a GPU whose neighbours are reached through host memory, as gloo does."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self.device = inner, device

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.to(self.device))
        return out.cpu()


def blocks(width: int, depth: int) -> nn.Sequential:
    """A deep network of equal layers, which any number of stages can share."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth - 1)]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give a module that has no storage yet storage on the device, and small random weights."""
    module.to_empty(device=device)
    for p in module.parameters():
        part: Tensor = p.to_local() if isinstance(p, DTensor) else p
        nn.init.normal_(part.detach(), std=0.02)


def layers_of(net: str, options: argparse.Namespace) -> nn.Sequential:
    if net == "blocks":
        return blocks(options.width, options.depth)
    features, classifier = alex_net(CLASSES, options.width)
    return nn.Sequential(*features, *classifier)


def pipeline(layers: nn.Sequential, mesh: DeviceMesh, options: argparse.Namespace) -> tuple[nn.Module, Step]:
    """This process's stage: as many layers as every other has, or one more."""
    stages, stage, device = mesh.size(), mesh.get_local_rank(), torch.device(options.device)
    bounds = [len(layers) * k // stages for k in range(stages + 1)]
    own = layers[bounds[stage] : bounds[stage + 1]]
    materialise(own, device)
    nccl = dist.get_backend() == "nccl"
    module = own if nccl or device.type == "cpu" else AcrossHost(own, device)
    wire = device if nccl else torch.device("cpu")
    schedule = Schedule1F1B(
        PipelineStage(module, stage, stages, wire, group=mesh.get_group()),
        options.microbatches,
        loss_fn=F.cross_entropy,
    )

    def step(x: Tensor, y: Tensor) -> None:
        inputs = (x.to(wire),) if stage == 0 else ()
        schedule.step(*inputs, target=y.to(wire) if stage == stages - 1 else None)

    return own, step


def build(options: argparse.Namespace) -> tuple[nn.Module, Step, DeviceMesh | None]:
    torch.manual_seed(0)
    mesh, group, device = None, options.group, torch.device(options.device)
    if group > 1:
        enough = options.device == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl" if enough else "cpu:gloo,cuda:gloo")
        shape = (int(os.environ["WORLD_SIZE"]) // group, group)
        mesh = init_device_mesh(options.device, shape, mesh_dim_names=("workers", "inside"))
        if options.how == "pipeline":
            with torch.device("meta"):  # no process ever holds all layers
                layers = layers_of(options.net, options)
            return *pipeline(layers, mesh["inside"], options), mesh
    if options.how == "hybrid" and mesh is not None:
        with torch.device("meta"):
            features, classifier = alex_net(CLASSES, options.width)
        materialise(features, device)
        hybrid = Hybrid(features, classifier, mesh["inside"])
        materialise(hybrid.classifier, device)
        model: nn.Module = hybrid
    else:
        model = layers_of(options.net, options).to(device)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()  # type: ignore[no-untyped-call]

    return model, step, mesh


def peak_memory(device: str) -> int:
    """Bytes that this process has needed at most: of the GPU, or all of it."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["whole", "pipeline", "hybrid"])
    parser.add_argument("net", choices=["blocks", "alexnet"])
    for name in ("group", "batch", "microbatches", "steps", "width", "depth"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    before = peak_memory(options.device)
    model, step, mesh = build(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = shoal.attach(model, optimizer, "sync", mesh=mesh)
    shape = (options.width,) if options.net == "blocks" else (3, 64, 64)
    dice = torch.Generator().manual_seed(training.rank)
    x = torch.randn(options.batch // training.workers, *shape, generator=dice)
    y = torch.randint(CLASSES, (len(x),), generator=dice)
    began = 0.0
    for number in range(WARM_UP + options.steps):
        if number == WARM_UP:
            began = time.perf_counter()
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    if options.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    training.finish()
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    memory = peak_memory(options.device) - before
    print(json.dumps({"seconds": seconds, "memory": memory, "parameters": held}))


main()
