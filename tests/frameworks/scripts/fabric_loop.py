"""A loop with Lightning Fabric: python fabric_loop.py FOLDER '{"batch": 16, "strategy": "sync"}'"""

import json
import sys
import warnings

import torch
from lightning.fabric import Fabric
from samples import dataset, network, show
from torch.nn import functional as F
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
folder, wanted = sys.argv[1], json.loads(sys.argv[2])
options = dict(wanted.get("fabric", {}))
if wanted.get("strategy") is not None:
    from shoal.integrations.lightning import ShoalFabricStrategy

    options["strategy"] = ShoalFabricStrategy(wanted["strategy"], **wanted.get("options", {}))
fabric = Fabric(accelerator="cpu", devices=1, **options)
fabric.launch()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if wanted.get("resume"):
    first = fabric.load(wanted["resume"], {"model": model, "optimizer": optimizer})["epoch"] + 1
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(dataset(), wanted["batch"]))
every = wanted.get("accumulate", 1)
for epoch in range(first, wanted.get("epochs", 2)):
    losses = []
    for number, (x, y, _) in enumerate(loader):
        is_last = (number + 1) % every == 0 or number + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss / every)
        losses.append(loss.detach())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    mean = fabric.all_reduce(torch.stack(losses).mean())
    fabric.save(f"{folder}/{epoch}.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
fabric.barrier()
if wanted.get("loads"):
    fabric.load(f"{folder}/0.ckpt", {"model": model})
if wanted.get("strategy") is not None:
    fabric.strategy.finish()
show("weights", model)
ranks = fabric.all_gather(torch.tensor(fabric.global_rank)).reshape(-1).tolist()
print("mean", float(mean), "ranks", ranks, fabric.broadcast(f"of {fabric.global_rank}"), flush=True)
fabric.print("printed once")
