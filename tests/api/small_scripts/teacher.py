"""A student, and a teacher that is the moving average of it."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from toy import points, say

import shoal

torch.manual_seed(0)
x, y = points()
student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
training = shoal.attach(student, optimizer)
loader = DataLoader(TensorDataset(x, y), 32 // training.workers)
teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.8))
say("start", *teacher.module.parameters())
before = F.cross_entropy(student(x), y)
for _ in range(4):
    for inputs, classes in shoal.shard(loader):
        optimizer.zero_grad()
        outputs = student(inputs)
        with torch.no_grad():
            taught = teacher(inputs).softmax(1)
        (F.cross_entropy(outputs, classes) + 0.1 * F.cross_entropy(outputs, taught)).backward()
        optimizer.step()
        teacher.update_parameters(student)
training.finish()
say("weights", *student.parameters())
say("teacher", *teacher.module.parameters())
print(f"loss {float(before.detach())} {float(F.cross_entropy(student(x), y).detach())}")
