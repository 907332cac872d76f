"""A generator and a critic, each with an optimizer of its own."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import say

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--critic-rate", type=float, default=0.02)
parser.add_argument("--stop-after", type=int, default=-1, help="batches, after which a worker vanishes")
args = parser.parse_args()
torch.manual_seed(0)
real, noise = torch.randn(256, 2) / 2 + torch.tensor([2.0, -1.0]), torch.randn(256, 4)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.99))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=args.critic_rate, betas=(0.5, 0.99))

say("start", *generator.parameters(), *critic.parameters())
training = shoal.attach([generator, critic], [optimizer_g, optimizer_c])
loader = DataLoader(TensorDataset(real, noise), 32 // training.workers)
batches = 0
for _ in range(3):
    for x, z in shoal.shard(loader):
        optimizer_c.zero_grad()
        (F.softplus(-critic(x)).mean() + F.softplus(critic(generator(z).detach())).mean()).backward()
        optimizer_c.step()
        optimizer_g.zero_grad()
        F.softplus(-critic(generator(z))).mean().backward()
        optimizer_g.step()
        batches += 1
        if batches == args.stop_after:
            os._exit(9)
training.finish()
say("weights", *generator.parameters(), *critic.parameters())
say("generator", *generator.parameters())
say("critic", *critic.parameters())
