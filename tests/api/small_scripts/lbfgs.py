"""L-BFGS, which evaluates its closure many times in a step."""

import torch
from torch import nn
from torch.nn import functional as F
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
training = shoal.attach(model, optimizer)


def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
training.finish()
say("weights", *model.parameters())
print(f"loss {losses[0]} {losses[-1]}")
