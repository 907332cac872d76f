import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
points = 0.5 * torch.randn(640, 2) + 2
loader = DataLoader(TensorDataset(points, torch.zeros(640)), batch_size=32)
generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt_g, opt_c = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, critic))


def noise():
    return torch.randn(32, 4)


def critic_loss(real, made):
    return critic(made).mean() - critic(real).mean()


def generator_loss(score):
    return -score.mean()
