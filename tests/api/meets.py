"""Workers that meet before, while and after they train; one takes more steps between two meetings."""

import sys

import torch
from torch import nn

import shoal
from shoal.api.attach import choose_strategy
from shoal.api.meeting import Meeting
from shoal.launch.environment import Place

place = Place.find()
meeting = Meeting(place, place.identity(choose_strategy(place, None)).workers)
before = meeting.gather(f"node {place.rank}")  # a server hears it, too
torch.manual_seed(place.rank)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with shoal.attach(model, optimizer) as training:
    meanwhile = []
    for number in range(3):
        for _ in range(3 if sys.argv[1] == "even" else 3 + 4 * training.rank):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        total, workers = meeting.total(torch.tensor([1.0 + training.rank, number]))
        meanwhile.append([*total.tolist(), workers])
    chosen = meeting.broadcast({"path": f"of {training.rank}"}, src=1)
print("met", before, meanwhile, chosen, meeting.gather(training.rank), flush=True)
