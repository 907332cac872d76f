"""An actor and a critic that judges its choices; both losses are back-propagated before either step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
chance = -torch.rand(256, 3).log().neg().log()  # Gumbel noise: the same choices, however many workers
actor, critic = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=0.05)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)
training = shoal.attach([actor, critic], [actor_optimizer, critic_optimizer])
loader = DataLoader(TensorDataset(x, y, chance), 32 // training.workers)
before = F.cross_entropy(actor(x), y)
for _ in range(4):
    for state, best, luck in shoal.shard(loader):
        actor_optimizer.zero_grad(set_to_none=False)
        critic_optimizer.zero_grad(set_to_none=False)
        logits, value = actor(state), critic(state).squeeze(1)
        action = (logits + luck).argmax(1)
        reward = (action == best).float()
        (F.cross_entropy(logits, action, reduction="none") * (reward - value).detach()).mean().backward()
        F.mse_loss(value, reward).backward()
        critic_optimizer.step()
        actor_optimizer.step()
training.finish()
say("weights", *actor.parameters(), *critic.parameters())
print(f"loss {float(before.detach())} {float(F.cross_entropy(actor(x), y).detach())}")
