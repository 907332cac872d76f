"""Lightning's Trainer: python lightning_trainer.py FOLDER '{"batch": 16, "strategy": "sync"}'"""

import json
import sys
import warnings

import lightning as L
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from samples import dataset, network, show
from torch.nn import functional as F
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
folder, wanted = sys.argv[1], json.loads(sys.argv[2])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, number):
        x, y, index = batch
        print("seen", self.current_epoch, *index.tolist(), flush=True)
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, number):
        x, y, _ = batch
        self.log("val", F.cross_entropy(self.net(x), y), sync_dist=True)
        self.log("count", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.log("own", float(self.global_rank * self.current_epoch), batch_size=1)  # worse at worker 1

    def configure_optimizers(self):
        if wanted.get("optimizer") == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=wanted.get("momentum", 0.9))
        steps = self.trainer.estimated_stepping_batches  # it asks for the loaders before anything is attached
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps // 6), 0.9)]


options = dict(wanted.get("trainer", {}))
if wanted.get("strategy") is not None:
    from shoal.integrations.lightning import ShoalStrategy

    options["strategy"] = ShoalStrategy(wanted["strategy"], **wanted.get("options", {}))
callbacks = [
    ModelCheckpoint(save_top_k=-1, filename="{epoch}"),
    ModelCheckpoint(monitor="val", filename="best"),
]
if wanted.get("stops"):
    callbacks.append(EarlyStopping("own", patience=1))
if wanted.get("averages"):
    name, how = wanted["averages"]
    callbacks.append(getattr(of_lightning, name)(**how))
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=wanted.get("epochs", 2),
    default_root_dir=folder,
    logger=CSVLogger(folder),
    callbacks=callbacks,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
    **options,
)
module = Module()
train = DataLoader(dataset(), wanted["batch"], shuffle=wanted.get("shuffle", False))
trainer.fit(module, train, DataLoader(dataset(), 32), ckpt_path=wanted.get("resume"), weights_only=False)
show("weights", module)
print("epochs", trainer.current_epoch, "steps", trainer.global_step)
print("metrics", json.dumps({name: float(value) for name, value in trainer.callback_metrics.items()}))
print("best", callbacks[1].best_model_path, flush=True)
