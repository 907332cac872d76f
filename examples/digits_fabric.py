"""Digits with Lightning Fabric. `diff` this and digits_fabric_shoal.py: that is the tutorial."""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = torch.utils.data.random_split(data, [1500, 297], torch.Generator().manual_seed(0))

fabric = Fabric()
fabric.seed_everything(0, verbose=False)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train, 32, shuffle=True))
tests = fabric.setup_dataloaders(DataLoader(test, 297), use_distributed_sampler=False)

for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()

x, y = next(iter(tests))
accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
fabric.print(f"test accuracy {100 * accuracy:.2f} %")
