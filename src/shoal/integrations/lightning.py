"""Lightning: `Trainer(strategy=ShoalStrategy("diloco", period=100))`, and the same for Fabric."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.api.shard import count_samples, dealt_loader
from shoal.core.codec import Codec
from shoal.integrations.workers import Workers, missing
from shoal.vocabulary.strategy import Sends, Strategy

try:
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDevice
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise missing("lightning", "lightning") from error

TRAINING_LOADERS = "train_dataloader()"
"""The barrier at which Lightning says that the loaders it processes next are those of the training data."""


class ManyWorkers:
    """What both kinds of Lightning's strategies answer alike: each process has one device and a rank."""

    workers: Workers

    def _join(
        self, strategy: Strategy | str | None, codec: Codec | str | None, options: dict[str, Any]
    ) -> None:
        self.workers = Workers("Lightning", strategy, codec, options)
        self.global_rank = self.workers.rank
        self.local_rank = self.workers.local_rank
        self.world_size = self.workers.size
        self._devices: list[torch.device] = []
        rank_zero_only.rank = self.workers.rank  # Lightning's loggers and messages ask it

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should reduce what a module logs with `sync_dist=True`."""
        return self.workers.size > 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and saves."""
        return self.workers.is_first

    @property
    def root_device(self) -> torch.device:
        """This worker's device: on a host with several, workers take turns."""
        if not self._devices:
            return torch.device("cpu")
        return self._devices[self.local_rank % len(self._devices)]

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this host that Lightning was told to use."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1 and devices[0].type == "cpu":
            raise ValueError(
                f"devices={len(devices)} asks Lightning to start processes, and Shoal's workers are started "
                f"by `shoal run -n {len(devices)} train.py`; leave it out, or take devices=1"
            )
        self._devices = devices

    @property
    def num_nodes(self) -> int:
        """Always 1: where the workers run is the launcher's business."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            raise ValueError(
                f"num_nodes={number} asks Lightning to count hosts, and Shoal's launcher starts the workers "
                "on them; leave it out"
            )

    _num_nodes = num_nodes  # what Fabric sets

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        self.workers.meeting.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of worker `src`, which JSON must be able to write."""
        return self.workers.meeting.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any of them, decide so."""
        decisions = self.workers.meeting.gather(bool(decision))
        return bool(min(decisions) if all else max(decisions))

    def _gathered(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        _check_group(group)
        if sync_grads:
            raise ValueError(
                "all_gather(sync_grads=True) is not possible: Shoal's workers exchange values only"
            )
        return self.workers.meeting.stack(tensor) if self.workers.size > 1 else tensor

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        _check_group(group)
        operation = str(reduce_op or "mean").lower().rpartition(".")[2]
        if operation not in ("mean", "avg", "sum"):
            raise ValueError(f"reduce_op={reduce_op!r} is not possible; take 'mean' or 'sum'")
        if self.workers.size == 1 or not isinstance(tensor, Tensor):
            return tensor
        total, workers = self.workers.meeting.total(tensor)
        return total if operation == "sum" else total / workers


class ShoalStrategy(ManyWorkers, SingleDeviceStrategy):
    """Trains with Lightning's Trainer on the workers that `shoal run` or torchrun started.

    `strategy` is a word with its options here, or an object, as in shoal.attach(). Each worker trains on its
    share of the training data. Validation, test and prediction data is read whole by every worker, as in a
    single process; within fit() the common model is evaluated and saved.
    """

    strategy_name = "shoal"

    def __init__(
        self, strategy: Strategy | str | None = None, *, codec: Codec | str | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._join(strategy, codec, options)
        self._deals = False  # the loaders that are processed next
        self._shares_data: bool | None = None  # as the Trainer was told
        self._evaluation = ExitStack()

    @property
    def _layer_sync(self) -> None:
        """Nothing: Trainer(sync_batchnorm=True) has no place here."""

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: Any) -> None:
        if layer_sync is not None and self.workers.size > 1:
            raise ValueError(
                "sync_batchnorm=True needs torch.distributed at every layer; take BatchNorm, whose "
                "statistics are averaged in the end, or GroupNorm"
            )

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if self._shares_data is None:
            connector = model.trainer._accelerator_connector
            self._shares_data = connector.use_distributed_sampler
            connector.use_distributed_sampler = False  # or it would deal out each loader, and fill it up

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.optimizers:
            self._check_callbacks(trainer)
            self.workers.attach(self.lightning_module, self.optimizers)

    def _check_callbacks(self, trainer: Trainer) -> None:
        averages = self.workers.strategy.sends in (Sends.MEAN_GRADIENTS, Sends.NOTHING)
        for callback in trainer.callbacks:
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and not averages:
                raise ValueError(
                    f"{type(callback).__name__} replaces the weights in the end, which "
                    f"{self.workers.strategy} would merge like a step; take strategy 'sync'"
                )

    def barrier(self, name: str | None = None) -> None:
        self._deals = name == TRAINING_LOADERS
        super().barrier(name)

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.workers.size == 1 or not self._deals or not self._shares_data:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise ValueError(
                f"a {type(dataloader).__name__} cannot be shared among {self.workers.size} workers; take a "
                "DataLoader, or Trainer(use_distributed_sampler=False) and other data at each worker"
            )
        return dealt_loader(dataloader, self.workers.seat, int(os.environ.get("PL_GLOBAL_SEED", 0)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.workers.training is not None:
            self.workers.training.saw(count_samples(batch))

    def on_validation_start(self) -> None:
        self._evaluation.enter_context(self.workers.common_model())

    def on_validation_end(self) -> None:
        self._evaluation.close()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or sum over all workers while training; of evaluations every worker has all data."""
        return self._reduced(tensor, group, reduce_op) if self._is_training else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._gathered(tensor, group, sync_grads) if self._is_training else tensor

    @property
    def _is_training(self) -> bool:
        return bool(self.lightning_module.trainer.training)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The common model, at the worker that saves it."""
        if not self.is_global_zero:
            return dict(super().lightning_module_state_dict())
        self.workers.warn_of_state(self.optimizers)
        with self.workers.common_model():
            return _copied(super().lightning_module_state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.workers.check_can_resume(self.optimizers)
        super().load_optimizer_state_dict(checkpoint)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.workers.abandon()

    def teardown(self) -> None:
        self.workers.finish()  # before the model leaves its device
        super().teardown()


class ShoalFabricStrategy(ManyWorkers, FabricSingleDevice):
    """Trains with Lightning Fabric on the workers that `shoal run` or torchrun started.

    `fabric.setup(model, optimizer)` attaches them. Fabric's own sampler deals out the loaders. Training is
    finished at the end of the script, or by `fabric.strategy.finish()`, after which the model is final.
    """

    def __init__(
        self, strategy: Strategy | str | None = None, *, codec: Codec | str | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._join(strategy, codec, options)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """This worker's place in the DistributedSampler that Fabric makes; None for a single worker."""
        rank, workers = self.workers.seat
        return {"num_replicas": workers, "rank": rank} if workers > 1 else None

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        self.workers.attach(module, optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise ValueError("set up the model and its optimizers in one call: fabric.setup(model, optimizer)")

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._gathered(tensor, group, sync_grads)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The common model, at the worker that saves it."""
        if not self.is_global_zero:
            return dict(super().get_module_state_dict(module))
        with self.workers.common_model():
            return _copied(super().get_module_state_dict(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        self.workers.check_can_load()
        super().load_module_state_dict(module, state_dict, strict)

    def finish(self) -> None:
        """Merge the last updates and leave the trained model in the module of every worker."""
        self.workers.finish()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, (str, bool)):
        raise ValueError(f"a process group ({group!r}) of torch.distributed has no part in a run of Shoal")
