"""A loop with Accelerate: python accelerate_loop.py FOLDER '{"batch": 16, "order": "after"}'"""

import json
import sys

import torch
from accelerate import Accelerator
from samples import dataset, network, show
from torch.nn import functional as F
from torch.utils.data import DataLoader

folder, wanted = sys.argv[1], json.loads(sys.argv[2])
order, is_shoal = wanted.get("order", "after"), wanted.get("strategy") is not None
if is_shoal:
    import shoal

accelerator = Accelerator(cpu=True, **wanted.get("accelerator", {}))
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
loader = DataLoader(dataset(), wanted["batch"], shuffle=wanted.get("shuffle", False))
if is_shoal and order == "before":
    training = shoal.attach(model, optimizer, wanted["strategy"])
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
if wanted.get("resume"):
    accelerator.load_state(wanted["resume"])  # before attach(), whose strategy starts from these weights
if is_shoal and order == "after":
    training = shoal.attach(model, optimizer, wanted["strategy"])
steps = 0
for epoch in range(wanted.get("begin", 0), wanted.get("epochs", 2)):
    if is_shoal:
        batches = shoal.shard(loader)
    else:
        batches = loader
    for x, y, index in batches:
        print("seen", epoch, *index.tolist(), flush=True)
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            steps += accelerator.sync_gradients
            optimizer.step()
            schedule.step()
    if wanted.get("saves"):
        accelerator.save_state(f"{folder}/{epoch}")
if is_shoal:
    training.finish()
show("weights", model)
print("steps", steps, "rate", schedule.get_last_lr()[0], flush=True)
accelerator.print("printed by the main process")
