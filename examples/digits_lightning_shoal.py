"""Digits with Lightning on many workers: shoal run -n 4 examples/digits_lightning_shoal.py"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.integrations.lightning import ShoalStrategy


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = torch.utils.data.random_split(data, [1500, 297], torch.Generator().manual_seed(0))
L.seed_everything(0, verbose=False)
model, loader, tests = Digits(), DataLoader(train, 32, shuffle=True), DataLoader(test, 297)
trainer = L.Trainer(
    max_epochs=5,
    enable_progress_bar=False,
    enable_checkpointing=False,
    logger=False,
    strategy=ShoalStrategy("diloco", period=10),
)
trainer.fit(model, loader)
accuracy = trainer.validate(model, tests, verbose=False)[0]["accuracy"]
print(f"test accuracy {100 * accuracy:.2f} %")
