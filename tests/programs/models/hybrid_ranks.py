"""Processes of one group compute what one process computes, and say by how much they differ.

What is cut, and into how many parts, is on the command line; each process compares with its own whole twin.
"""

import copy
import sys
from itertools import pairwise

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from shoal.programs.models.hybrid import Hybrid, cut_linear_layers, own_part
from shoal.programs.models.mesh_branches import MeshBranches

dist.init_process_group("gloo")
parts = dist.get_world_size()
mesh = init_device_mesh("cpu", (parts,), mesh_dim_names=("inside",))
torch.manual_seed(0)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(what, ours, twin):
    """The largest difference of the gradients of two models, and whether there is anything to compare."""
    pairs = [(whole(p.grad), q.grad) for p, q in zip(ours.parameters(), twin.parameters(), strict=True)]
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    print(what, apart if all(b.any() for _, b in pairs) else "nothing to compare")


def columns_and_rows():
    for sizes in ((4, 6, 3), (5, 7, 9, 2), (3, 5)):  # pairs, and a last layer without a partner
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
        twin = nn.Sequential(*layers)
        ours, x = cut_linear_layers(copy.deepcopy(twin), mesh), torch.randn(6, sizes[0])
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = whole(ours(a))
        out.square().sum().backward()
        twin(b).square().sum().backward()
        compare(f"layers {sizes}", ours, twin)
        with torch.no_grad():
            print("inputs", float((a.grad - b.grad).abs().max()))
            print("outputs", float((out - twin(x)).abs().max()))


def hybrid():
    features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten())
    classifier = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    twin = nn.Sequential(features, classifier)
    ours = Hybrid(copy.deepcopy(features), copy.deepcopy(classifier), mesh)
    for samples in (2 * parts, 5, 1):  # equal parts, unequal ones, and processes without any
        x, y = torch.randn(samples, 1, 4, 4), torch.randint(3, (samples,))
        for model in (ours, twin):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        compare(f"samples {samples} of which {len(own_part(x, mesh))} here", ours, twin)
    F.cross_entropy(ours(x), y).backward()
    F.cross_entropy(twin(x), y).backward()
    compare("accumulated", ours, twin)


def branches():
    encoder, head = nn.Linear(4, 3), nn.Linear(3 * parts, 1)
    ours = MeshBranches(copy.deepcopy(encoder), copy.deepcopy(head), mesh)
    twin = nn.ModuleList([encoder, head])
    inputs = torch.randn(parts, 6, 4).unbind()
    out = ours(*inputs)
    out.square().sum().backward()
    head(torch.cat([encoder(x) for x in inputs], dim=-1)).square().sum().backward()
    compare("branches", ours, twin)


def pipelines():
    """Stage k is a layer; the first and the last share their weights, whose gradients are then summed."""
    layers = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(parts)]
    own = copy.deepcopy(layers[mesh.get_local_rank()])
    twin = nn.Sequential(*layers)
    twin[-1][0].weight = twin[0][0].weight
    if mesh.get_local_rank() == parts - 1:
        own[0].weight.data.copy_(twin[0][0].weight)
    ends = dist.new_group([0, parts - 1])
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    F.mse_loss(twin(x), y).backward()
    for kind, microbatches in ((ScheduleGPipe, 1), (ScheduleGPipe, 4), (Schedule1F1B, 4), (Schedule1F1B, 8)):
        own.zero_grad()
        stage = PipelineStage(own, mesh.get_local_rank(), parts, torch.device("cpu"), group=mesh.get_group())
        schedule = kind(stage, microbatches, loss_fn=F.mse_loss)
        arguments = (x,) if stage.is_first else ()
        schedule.step(*arguments, **({"target": y} if stage.is_last else {}))
        if stage.is_first or stage.is_last:
            dist.all_reduce(own[0].weight.grad, group=ends)
        expected = twin[mesh.get_local_rank()][0].weight.grad
        apart = float((own[0].weight.grad - expected).abs().max())
        print(kind.__name__, microbatches, apart if expected.any() else "nothing to compare")


for name in sys.argv[1:]:
    {f.__name__: f for f in (columns_and_rows, hybrid, branches, pipelines)}[name]()
dist.destroy_process_group()
