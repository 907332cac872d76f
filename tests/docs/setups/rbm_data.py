import torch

from shoal import Data


def data():
    x = (torch.rand(200, 784, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    return Data(x, x, x[:10], x[:10])
