"""A loop over data that are the same at all workers, or not: see `--data`."""

import argparse

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

import shoal
from shoal.launch.environment import Place

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="whole")
parser.add_argument("--seeded", action="store_true")
parser.add_argument("--peek", action="store_true", help="the first worker looks at a batch")
args = parser.parse_args()

rank = Place.find().rank
torch.manual_seed(0 if args.seeded else rank)
numbers = TensorDataset(torch.arange(100.0).reshape(-1, 1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(100.0).reshape(-1, 1) + 1000 * rank)


class Prepared(DataLoader):
    def __iter__(self):
        return ([batch * 2.0 for batch in each] for each in super().__iter__())


LOADERS = {
    "whole": lambda: DataLoader(numbers, 8, shuffle=True),
    "split": lambda: DataLoader(random_split(numbers, [80, 20])[0], 8, shuffle=True),
    "sampled": lambda: DataLoader(numbers, 8, sampler=SubsetRandomSampler(torch.randperm(100).tolist()[:80])),
    "sizes": lambda: DataLoader(numbers, 8 + rank),
    "batches": lambda: DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 8, False)),
    "shares": lambda: DataLoader(numbers, 8, sampler=DistributedSampler(numbers, 2, rank)),
    "stream": lambda: DataLoader(Stream(), 8 + rank),
    "subclass": lambda: Prepared(numbers, 8, shuffle=True),
    "seeded subclass": lambda: Prepared(numbers, 8, shuffle=True, generator=torch.Generator().manual_seed(0)),
    "few batches": lambda: DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 40, False)),
}
loader = LOADERS[args.data]()
torch.manual_seed(0)
model = nn.Linear(1, 1)
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
training = shoal.attach(model, optimizer)
if args.peek and training.is_first:
    next(iter(shoal.shard(loader)))
for _ in range(3):
    for batch in shoal.shard(loader):
        x = batch[0] if isinstance(batch, list) else batch
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
training.finish()
print("trained")
