"""What other frameworks wrap around an optimizer, a model or a loader, and what is inside.

None of them is imported here: who has wrapped something has imported it before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

ACCELERATE = "accelerate."
FABRIC = "lightning.fabric.wrappers"

Dress = Callable[["DataLoader[Any]"], "DataLoader[Any]"]

LEAVE_OUT = "attach() the model inside it, and leave the wrapper out"

AVERAGES_ITSELF = {
    "DistributedDataParallel": LEAVE_OUT,
    "FullyShardedDataParallel": "cut the model with fully_shard instead, and say attach(..., mesh=mesh)",
    "DeepSpeedEngine": LEAVE_OUT,
}
"""Wrappers of a model that synchronise it with other processes, and what to do instead."""


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose `step` is called when a step is due, inside Accelerate's or Fabric's wrapper."""
    if _is_of(optimizer, ACCELERATE) or _is_of(optimizer, FABRIC):
        inner: torch.optim.Optimizer = optimizer.optimizer  # type: ignore[attr-defined]
        return inner
    return optimizer


def rebind(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have the wrappers among them call the `step` that the optimizer inside has now.

    With a GradScaler, Accelerate keeps the step that it found, and looks again only when it is unpickled.
    """
    for optimizer in optimizers:
        if _is_of(optimizer, ACCELERATE):
            optimizer.__setstate__({})


def check_wrappers(model: nn.Module, workers: int) -> None:
    """Raise ValueError if somebody else synchronises the model with other processes, too."""
    if workers == 1:
        return
    for module in model.modules():
        if (name := type(module).__name__) in AVERAGES_ITSELF:
            raise ValueError(
                f"the model is wrapped in {name}, which synchronises it already; {AVERAGES_ITSELF[name]}"
            )
    processes = _shared("PartialState").get("num_processes", 1)
    if processes > 1:
        raise ValueError(
            f"Accelerate runs {processes} processes itself, and would put DistributedDataParallel on top; "
            f"start the script with `shoal run -n {processes}` instead of torchrun or accelerate launch"
        )


def tell_rank(rank: int) -> None:
    """Have Accelerate, if it is in use, print, log and save at worker 0 alone."""
    for name in ("PartialState", "AcceleratorState"):
        state = _shared(name)
        if state:
            state.update(process_index=rank, local_process_index=rank)


def save_apart(model: nn.Module) -> None:
    """Give the tensors of a `state_dict` a storage each, if Accelerate is in use.

    It takes parameters that share a storage, as attached ones do, for tied weights, and would save only one.
    """
    if _shared("PartialState"):
        model.register_state_dict_post_hook(_clone_all)  # type: ignore[no-untyped-call]


def _clone_all(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.clone()


def undress(loader: DataLoader[Any]) -> tuple[DataLoader[Any], Dress]:
    """A plain loader of the same batches, and what makes a loader of other batches like the given one."""
    if _is_of(loader, ACCELERATE):
        return _with_batch_size(loader.base_dataloader), _accelerated(loader)  # type: ignore[attr-defined]
    return loader, lambda plain: plain


def _accelerated(loader: Any) -> Dress:
    """How to have Accelerate place batches and recognise the last one, as it does for `loader`."""
    if getattr(loader, "skip_batches", 0) or type(loader.batch_sampler).__name__ == "SkipBatchSampler":
        raise ValueError(
            "skip_first_batches() skips batches of all workers, and shard() deals out what is left; skip "
            "those of this worker: itertools.islice(shoal.shard(loader), n, None)"
        )
    prepare = sys.modules["accelerate.data_loader"].prepare_data_loader
    device = loader.device

    def dress(plain: DataLoader[Any]) -> Any:
        return prepare(
            plain, device=device, num_processes=1, process_index=0, put_on_device=device is not None
        )

    return dress


def _with_batch_size(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader as its user made it: Accelerate hands on the sampler that torch makes of a batch size."""
    batches = loader.batch_sampler
    if loader.batch_size is not None or type(batches) is not BatchSampler:
        return loader
    sampler = batches.sampler
    if type(sampler).__name__ == "SeedableRandomSampler":  # its seed need not be that of the other workers
        sampler = RandomSampler(loader.dataset)  # type: ignore[arg-type]
    plain: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=batches.batch_size,
        sampler=sampler,
        drop_last=batches.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    return plain


def _is_of(thing: object, module: str) -> bool:
    return any(kind.__module__.startswith(module) for kind in type(thing).__mro__)


def _shared(name: str) -> Any:
    """The state that Accelerate shares in this process; empty if it is not in use."""
    module = sys.modules.get("accelerate.state")
    return {} if module is None else getattr(module, name)._shared_state
