import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.programs.tasks.digits import digits_data

data = digits_data()
loader = DataLoader(TensorDataset(data.x, data.y), batch_size=32, shuffle=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
