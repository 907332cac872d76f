"""The worker process of slow_link.py: says when it is ready, trains one trial when told to, and reports.

It writes JSON objects to its output, one a line, and starts training when it reads "go".
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F

import shoal
from shoal.launch.control import leave_with_parent
from shoal.programs.tasks import TASKS
from shoal.replicas.batches import Batches
from shoal.runs.evaluation import evaluate
from shoal.strategies import STRATEGIES
from shoal.studies.shaped_hosts import INTERFACE
from shoal.vocabulary.strategy import Strategy

DDP = "ddp"
POWER_SGD = "powersgd"
BUCKET = 64  # MB, the whole model: torch's PowerSGD over gloo mixes up the sums of several buckets
ALONE_STEPS = 5  # steps without exchange, to measure computing alone
REPORT_SECONDS = 0.5  # between two progress reports


@dataclass(frozen=True)
class Trial:
    """The settings of one training, which all its workers receive."""

    word: str  # DDP or one of Shoal's strategies; a codec may follow after a plus sign
    options: dict[str, Any]  # of that strategy
    lr: float
    sgd_momentum: float  # of the workers' own optimizers
    task: str
    hidden: int
    batch: int
    steps: int
    workers: int
    seed: int
    timeout: float

    @property
    def strategy(self) -> Strategy | None:
        """None for DDP."""
        return None if self.kind == DDP else STRATEGIES.make(self.kind, **self.options)

    @property
    def kind(self) -> str:
        """The word without its codec."""
        return self.word.partition("+")[0]

    @property
    def codec(self) -> str:
        """The codec of Shoal's strategy, or of a hook for DDP."""
        return self.word.partition("+")[2] or "none"

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return int(getattr(self.strategy, "period", 1))

    @property
    def nodes(self) -> int:
        """The number of processes, servers included."""
        return self.workers + (self.strategy.servers if self.strategy else 0)

    @property
    def samples(self) -> int:
        """The samples of all workers together."""
        return self.steps * self.batch * self.workers


def mlp(inputs: int, hidden: int) -> nn.Module:
    """Two hidden layers; 10,004,950 parameters for 784 inputs and 2,790 hidden units."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


class Loop:
    """A training loop as a user writes it; the learning rate decays linearly to 0."""

    def __init__(self, trial: Trial, model: nn.Module, batches: Batches) -> None:
        self._steps, self._model, self._batches = trial.steps, model, batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr, momentum=trial.sgd_momentum)

    def train(self, steps: int) -> Iterator[float]:
        """Takes steps, and yields the seconds that each took."""
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / self._steps)
        for _ in range(steps):
            began = time.perf_counter()
            x, y = self._batches.next()
            self.optimizer.zero_grad()
            F.cross_entropy(self._model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            schedule.step()
            yield time.perf_counter() - began


def with_hook(model: nn.parallel.DistributedDataParallel, codec: str) -> nn.Module:
    """Register torch's PowerSGD, or one of Shoal's codecs, as a hook of DDP."""
    if codec == POWER_SGD:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif codec != "none":
        model.register_comm_hook(None, shoal.comm_hook(codec))
    return model


def work(trial: Trial) -> None:
    """Be one worker: report readiness, train on "go", and report measurements."""
    leave_with_parent()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    task = TASKS.make(trial.task)
    data = task.data()
    torch.manual_seed(trial.seed)
    model = mlp(data.x.shape[1], trial.hidden)

    def loop_for(module: nn.Module) -> Loop:
        batches = Batches(
            data.x, data.y, batch=trial.batch, rank=rank, workers=trial.workers, seed=trial.seed
        )
        return Loop(trial, module, batches)

    alone = list(loop_for(copy.deepcopy(model)).train(1 + ALONE_STEPS))[1:]
    finish: Callable[[], object]
    if trial.strategy is None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=trial.timeout))
        loop = loop_for(
            with_hook(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET), trial.codec)
        )
        finish = dist.barrier  # DDP's models are the same after every step
    else:
        loop = loop_for(model)
        finish = shoal.attach(model, loop.optimizer, trial.strategy, codec=trial.codec).finish
    say(ready=True)
    if sys.stdin.readline() != "go\n":
        return
    measured = run_loop(loop, trial.steps, finish)
    if trial.strategy is None:
        dist.destroy_process_group()
    if rank == 0:
        score = evaluate(model, task, data)
        measured["test_loss"], measured["accuracy"] = score.loss, score.accuracy
        measured["parameters"] = sum(p.numel() for p in model.parameters())
    say(done=measured, alone=median(alone))


def run_loop(loop: Loop, steps: int, finish: Callable[[], object]) -> dict[str, Any]:
    """Train, reporting progress now and then; returns the measurements."""
    began, computed, before = time.perf_counter(), time.process_time(), bytes_sent()
    told, seconds = began, []
    for step, took in enumerate(loop.train(steps), 1):
        seconds.append(took)
        if (now := time.perf_counter()) - told > REPORT_SECONDS:
            told = now
            say(step=step, seconds=now - began, sent=bytes_sent() - before)
    finish()
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - computed,
        "bytes_sent": bytes_sent() - before,
        "step_seconds": seconds,
    }


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def bytes_sent() -> int:
    """Bytes sent by this namespace's interface so far, all headers included."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    work(Trial(**json.loads(sys.argv[1])))
