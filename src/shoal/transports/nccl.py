"""NCCL: sums among GPUs without a way through host memory, where every worker has a GPU of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.transports.rendezvous import Store, await_keys, missing

NEVER = timedelta(days=3650)
"""When NCCL gives up by itself, which ends the process: our own deadlines count."""

PAUSE_SECONDS = 1e-4
"""How often a sum is looked at that is not done: what waits in CUDA itself cannot be given up."""

NO_GPU = "none"


def join_gpus(
    store: Store, rank: int, workers: int, device: torch.device, seconds: float, gone: Set[int]
) -> Any:
    """A group of the workers' GPUs; None where two of them share one, or a torch is without NCCL.

    All workers call this together, and decide alike. Raises PeerLost naming who did not come.
    """
    has_nccl = dist.is_available() and dist.is_nccl_available()
    own = str(torch.cuda.get_device_properties(device).uuid) if has_nccl else NO_GPU
    keys = {k: f"shoal/gpu/{k}" for k in range(workers)}
    store.set(keys[rank], own)
    if absent := await_keys(store, keys, seconds, gone):
        raise missing(rank, absent, seconds, "say which GPU is theirs")
    gpus = [store.get(key).decode() for key in keys.values()]
    if NO_GPU in gpus or len(set(gpus)) < workers:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    c10d: Any = dist  # torch's stubs do not know PrefixStore
    return c10d.ProcessGroupNCCL(c10d.PrefixStore("shoal/nccl", store), rank, workers, options)


def finish_on_gpu(works: Sequence[dist.Work], deadline: float, gone: Set[int]) -> None:
    """Wait until all is done. Raises RuntimeError if it fails, somebody is gone, or time is up."""
    while not all(work.is_completed() for work in works):
        if gone or time.monotonic() > deadline:
            raise RuntimeError("a sum among GPUs was not done in time, or somebody has left it")
        time.sleep(PAUSE_SECONDS)
    for work in works:
        work.wait()  # tells what failed, and has later kernels come after it


def leave_gpus(group: Any) -> None:
    """End the group, also in the middle of a sum that will never be done."""
    with contextlib.suppress(RuntimeError):
        group.abort()
