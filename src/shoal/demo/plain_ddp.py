"""torch's DistributedDataParallel on the work of act 1: the same net, batches, samples and threads."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import WorkerFailed
from shoal.core.task import Task
from shoal.launch.control import leave_with_parent
from shoal.replicas.batches import Batches
from shoal.replicas.module import build_model
from shoal.runs.evaluation import evaluate

END_SECONDS = 10.0  # for a process that is done to end


def run_ddp(task: Task, workers: int, epochs: int, seed: int) -> dict[str, Any]:
    """Train on `workers` processes of one thread each. Returns seconds, without start and test, and accuracy.

    The batches are those of `shoal.run` with the same seed. A step takes `workers` batches, and the learning
    rate is as many times the task's, as usual with DDP. Raises WorkerFailed if a process fails.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        ours, theirs = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_train, args=(task, rank, workers, epochs, seed, folder, theirs), daemon=True
            )
            for rank in range(workers)
        ]
        try:
            with theirs:
                for process in processes:
                    process.start()
            return _hear(ours)
        finally:
            ours.close()
            for process in processes:
                process.join(END_SECONDS)
                process.kill()
                process.join()
                process.close()


def _hear(line: Connection) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(line.recv_bytes())
    except EOFError:
        raise WorkerFailed("a process of DistributedDataParallel ended without a result") from None
    if "failed" in said:
        raise WorkerFailed(f"DistributedDataParallel failed: {said['failed']}")
    return said


def _train(
    task: Task, rank: int, workers: int, epochs: int, seed: int, folder: str, line: Connection
) -> None:
    """The main function of a process."""
    leave_with_parent()
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
        reached = _learn(task, rank, workers, epochs, seed)
        if rank == 0:
            line.send_bytes(json.dumps(reached).encode())
        dist.destroy_process_group()
    except Exception as error:
        line.send_bytes(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    finally:
        line.close()


def _learn(task: Task, rank: int, workers: int, epochs: int, seed: int) -> dict[str, Any]:
    data = task.data()
    model = DistributedDataParallel(build_model(task, seed))
    optimizer = task.optimizer(model.parameters(), lr=workers * task.lr)
    batches = Batches(data.x, data.y, batch=task.batch, rank=rank, workers=workers, seed=seed)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(epochs * batches.steps_per_epoch):
        x, y = batches.next()
        optimizer.zero_grad()
        task.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - began
    reached = evaluate(model.module, task, data).accuracy if rank == 0 else None
    return {"seconds": seconds, "test_accuracy": reached}
