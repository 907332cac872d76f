from pathlib import Path

from safetensors.torch import save_file
from torch import nn

model = nn.Linear(2, 1)
Path("ckpt/bmuf").mkdir(parents=True)
save_file(model.state_dict(), "ckpt/bmuf/model.safetensors")
