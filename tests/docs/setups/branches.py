import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.launch.drive import drive
from shoal.programs.models.branches import BranchModel, LastState, propagate

model = BranchModel(LastState(256, 64), nn.Sequential(nn.Linear(128, 1), nn.Flatten(0)), ("cpu", "cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.rand(4, 140, 256), torch.rand(4, 140, 256), torch.ones(4))]
