"""One rank of a plain DDP script that takes its hooks from Shoal, for every codec in turn.

    python ddp_ranks.py FOLDER RANK RANKS [cuda]

On GPUs the ranks talk by NCCL. Leaves what it measured in FOLDER/RANK.json.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from own_codec import Steps
from shoal.codecs import CODECS
from shoal.core.codec import Codec, expect
from shoal.core.seeds import stream

STEPS, SPOILT, BATCH, INPUTS, CLASSES = 28, 5, 16, 20, 4
DEVICE = torch.device(sys.argv[4] if len(sys.argv) > 4 else "cpu")
BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"


@dataclass(frozen=True)
class Halves(Codec):
    """Half of every number arrives; the other half is given with the next."""

    feedback: str = "residual"

    def encode(self, v, state):
        return (v / 2,), state

    def decode(self, payload, out):
        (half,) = expect(payload, (out.dtype, out.numel()))
        return out.copy_(half)


def batches(rank):
    """Points around as many centres as there are classes; each rank has its own."""
    generator = stream(0, "data", rank)
    centres = torch.randn(CLASSES, INPUTS, generator=stream(0, "centres"))
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        yield centres[labels] + 0.5 * torch.randn(BATCH, INPUTS, generator=generator), labels


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    ).to(DEVICE)


def weights(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


def trained(rank, hook):
    """A model trained with that hook. One step's gradient is not finite at the last rank, and is refused."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.004)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.15, momentum=0.5)
    losses, refused = [], []
    for step, (x, y) in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x.to(DEVICE)), y.to(DEVICE))
        is_spoilt = step == SPOILT and rank == dist.get_world_size() - 1
        (loss * float("inf") if is_spoilt else loss).backward()
        losses.append(float(loss.detach()))
        if all(bool(p.grad.isfinite().all()) for p in ddp.parameters()):
            optimizer.step()
        else:  # as a gradient scaler does
            refused.append(step)
    return {"losses": losses, "weights": weights(ddp), "refused": refused}


@dataclass(frozen=True)
class Gathered(Halves):
    """The largest of what the ranks have, and half of their mean, out of what each rank gives."""

    in_flight = True

    async def average(self, v, state, workers):
        await workers.give("whole", (v, v[:1].to(torch.int64)))
        await workers.give("half", (v / 2,))
        most = await workers.largest(v)
        wholes, halves = await workers.take("whole"), await workers.take("half")
        assert [given.parts[1].item() for given in wholes] == [8, -16]
        assert sum(given.weight for given in wholes) == workers.total == 2.0
        return most + sum(given.parts[0] for given in halves) / workers.total, state


def by_hand(codec, gradient, steps):
    """Where steps of rate 1 lead if this is the gradient of this rank."""
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(dist.new_group(backend=BACKEND), shoal.comm_hook(codec))
    path = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.tensor([gradient])).sum().backward()
        with torch.no_grad():
            module.weight -= module.weight.grad
        path.append(weights(module))
    return path


def main(folder, rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, f"file://{folder}/store", rank=rank, world_size=ranks)
    told = {"plain": trained(rank, None)}
    if ranks == 2:
        told["by hand"] = by_hand(Halves(), [(8.0, -16.0)[rank]] * 3, steps=3)
        told["gathered"] = by_hand(Gathered(), [(8.0, -16.0)[rank]] * 3, steps=1)
        told["added up"] = by_hand(Steps(), ([126.0, 3.0, -60.0], [42.0, 3.0, -2.0])[rank], steps=2)
    for word in (word for word in CODECS if word != "factors"):  # which needs more than gradients
        told[word] = trained(rank, shoal.comm_hook(word))
    told["rank 1"] = trained(rank, shoal.comm_hook("low_rank:rank=1"))
    told["own"] = trained(rank, shoal.comm_hook(Steps()))
    told["shared"] = trained(rank, shoal.comm_hook("ternary:shared=true,feedback=residual"))
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
