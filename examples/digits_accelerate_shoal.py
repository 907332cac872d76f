"""Digits with Accelerate on many workers: shoal run -n 4 examples/digits_accelerate_shoal.py"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = torch.utils.data.random_split(data, [1500, 297], torch.Generator().manual_seed(0))

torch.manual_seed(0)
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(train, 32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in shoal.epochs(5, model, optimizer, shoal.DiLoCo(period=10)):
    for x, y in shoal.shard(loader):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()

x, y = next(iter(accelerator.prepare(DataLoader(test, 297))))
accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
accelerator.print(f"test accuracy {100 * accuracy:.2f} %")
