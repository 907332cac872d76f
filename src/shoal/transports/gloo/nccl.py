"""NCCL: all-reduce between GPUs without copies to host memory, if every worker has its own GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.transports.rendezvous import Store, await_keys, missing

NEVER = timedelta(days=3650)
"""NCCL's own timeout ends the process, so it is never reached: our deadlines apply."""

PAUSE_SECONDS = 1e-4
"""Polling interval for an unfinished all-reduce: a wait inside CUDA could not be abandoned."""

NO_GPU = "none"


def join_gpus(
    store: Store, rank: int, ranks: Sequence[int], device: torch.device, seconds: float, gone: Set[int]
) -> Any:
    """A group of the workers' GPUs; None if two workers share one, or a worker's torch has no NCCL.

    All workers call this together and decide alike. Raises PeerLost naming the missing workers.
    """
    has_nccl = dist.is_available() and dist.is_nccl_available()
    own = str(torch.cuda.get_device_properties(device).uuid) if has_nccl else NO_GPU
    keys = {k: f"shoal/gpu/{k}" for k in ranks}
    store.set(keys[rank], own)
    if absent := await_keys(store, keys, seconds, gone):
        raise missing(rank, absent, seconds, "publish its GPU")
    gpus = [store.get(key).decode() for key in keys.values()]
    if NO_GPU in gpus or len(set(gpus)) < len(ranks):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    c10d: Any = dist  # torch's stubs do not know PrefixStore
    return c10d.ProcessGroupNCCL(
        c10d.PrefixStore("shoal/nccl", store), ranks.index(rank), len(ranks), options
    )


def finish_on_gpu(works: Sequence[dist.Work], give_up: Callable[[], bool]) -> None:
    """Wait until all is done. Raises RuntimeError on failure, or when `give_up` says so."""
    while not all(work.is_completed() for work in works):
        if give_up():
            raise RuntimeError("an all-reduce between GPUs was not done in time, or a worker was lost")
        time.sleep(PAUSE_SECONDS)
    for work in works:
        work.wait()  # raises on failure, and orders later kernels after it


def leave_gpus(group: Any) -> None:
    """Abort the group, even during an all-reduce that will never finish."""
    with contextlib.suppress(RuntimeError):
        group.abort()
