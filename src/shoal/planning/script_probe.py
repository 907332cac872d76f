"""Times the steps of a script: python -m shoal.planning.script_probe FILE THREADS CODECS SCRIPT ARGUMENTS.

The script runs as a single worker. After enough steps it is ended, and what was seen is in FILE as JSON: the
time of its steps, the size of its model, what codecs make of it. `probe_script` starts such a process.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev
from time import perf_counter
from typing import Any

import torch
from torch import nn

from shoal.api.attach import when_attached
from shoal.api.attachment import Attachment
from shoal.core.errors import ShoalError, WorkerFailed
from shoal.launch.huge_pages import with_huge_pages
from shoal.planning.probing import codec_costs, connected_share, refused_by
from shoal.planning.workload import CodecCost, Workload
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.wrapped import unwrap_optimizer
from shoal.sim import Compute

WARM_UP, LEAST_STEPS, LEAST_SECONDS = 3, 10, 2.0
MOST_SECONDS = 600.0  # of a script before its steps are over
STEPS_WITHOUT_DATA = 1_000  # of an "epoch" of a script that does not read its data through shard()


class Enough(BaseException):
    """The script has shown enough. No script catches it by accident."""


@dataclass
class StepWatch:
    """Counts and times the steps of an attached script, and ends it."""

    attachment: Attachment
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    codecs: Sequence[str]
    taken: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    _before: float = 0.0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first one, whose steps are counted."""
        return self.optimizers[0]

    def begin(self) -> None:
        """From now on look at every step of the optimizer."""
        first, step = self.optimizer, self.optimizer.step

        def watched(_: torch.optim.Optimizer, *args: Any, **named: Any) -> Any:
            self.samples.append(self.replica.pending_samples)
            done = step(*args, **named)
            now = perf_counter()
            if self._before:
                self.taken.append(now - self._before)
            self._before = now
            self._end_if_enough()
            return done

        watched.__dict__.update(getattr(step, "__dict__", {}))
        first.step = types.MethodType(watched, first)  # type: ignore[method-assign]

    @property
    def replica(self) -> AttachedReplica:
        """The model as the engine has it."""
        replica = self.attachment.engine.replica
        assert isinstance(replica, AttachedReplica)
        return replica

    def _samples_of_a_pass(self) -> int | None:
        """Samples of the training data; None if the loop does not read it through shard()."""
        dealing = self.attachment.data.passes.dealing
        if dealing is None or dealing.items is None:
            return None
        return len(dealing.items) * (1 if dealing.batch else max(1, round(median(self.samples))))

    def _end_if_enough(self) -> None:
        counted = self.taken[WARM_UP:]
        if len(counted) >= LEAST_STEPS and sum(counted) >= LEAST_SECONDS:
            raise Enough

    def seen(self) -> dict[str, Any]:
        """What the plan must know of the script."""
        model, layout = self.model, self.replica.layout
        taken = sorted(self.taken[WARM_UP:] or self.taken)
        usual = taken[: max(1, len(taken) * 9 // 10)]
        kept = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        costs = codec_costs(self.codecs, layout.numel, layout.pieces(0, layout.numel))
        return {
            "steps": len(taken),
            "seconds": median(taken) if taken else 0.0,
            "jitter": pstdev(usual) / fmean(usual) if taken else 0.0,
            "batch": max(1, round(median(self.samples))) if self.samples else 1,
            "samples": self._samples_of_a_pass(),
            "parameters": layout.numel,
            "itemsize": next(model.parameters()).element_size(),
            "optimizer": sum(v.numel() for v in kept if v.numel() > 1) / max(1, layout.numel),
            "connected": connected_share(model),
            "refused": refused_by(*map(without_own_step, self.optimizers)),
            "codecs": {word: asdict(cost) for word, cost in costs.items()},
        }


def without_own_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer as it was before attach() put a step() of its own there, which looks like a user's."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return twin


@dataclass(frozen=True)
class ProbedScript:
    """A script as the formulas see it, its step, and what could not be learnt of it."""

    workload: Workload
    compute: Compute
    notes: Sequence[str]


def probe_script(script: Sequence[str], codecs: Sequence[str], threads: int) -> ProbedScript:
    """Run a script, with its arguments, for a few steps.

    Raises ShoalError if it never calls attach() or takes too few steps, and WorkerFailed if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        out = Path(folder) / "seen.json"
        line = [sys.executable, "-m", "shoal.planning.script_probe", str(out), str(threads), ",".join(codecs)]
        try:
            done = subprocess.run(
                [*line, *script],
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                stdin=subprocess.DEVNULL,
                env=with_huge_pages(os.environ),
            )
        except subprocess.TimeoutExpired:
            raise ShoalError(f"{script[0]} took no {LEAST_STEPS} steps in {MOST_SECONDS:g} s") from None
        if done.returncode:
            raise WorkerFailed(f"{script[0]} failed before it had taken enough steps", done.stderr)
        if not out.exists():
            raise ShoalError(
                f"{script[0]} never called shoal.attach(model, optimizer), by which a plan times its steps"
            )
        seen = json.loads(out.read_text(encoding="utf-8"))
    if seen["steps"] < 2:
        raise ShoalError(f"{script[0]} took only {seen['steps'] + 1} steps: too few to time them")
    return _read(Path(script[0]).name, seen)


def _read(name: str, seen: dict[str, Any]) -> ProbedScript:
    notes = ["what a script learns is not known before it has run: its settings are ordered by time alone"]
    samples = seen["samples"]
    if samples is None:
        samples = STEPS_WITHOUT_DATA * seen["batch"]
        notes.append(
            f"it does not read through shoal.shard: an epoch stands for {STEPS_WITHOUT_DATA:,} steps"
        )
    kept = ("batch", "parameters", "itemsize", "optimizer", "connected", "refused")
    figures = {key: seen[key] for key in kept}
    codecs = {word: CodecCost(**cost) for word, cost in seen["codecs"].items()}
    workload = Workload(task=name, samples=samples, codecs=codecs, **figures)
    return ProbedScript(workload, Compute(seen["seconds"], seen["jitter"]), notes)


def main() -> None:
    """Run the script named on the command line, and write down what its steps were like."""
    out, threads, codecs, *script = sys.argv[1:]
    torch.set_num_threads(int(threads))
    watches: list[StepWatch] = []

    def listen(attachment: Attachment, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        words = [word for word in codecs.split(",") if word]
        watches.append(StepWatch(attachment, model, [unwrap_optimizer(one) for one in optimizers], words))
        watches[-1].begin()

    when_attached(listen)
    sys.argv = script
    sys.path[0] = str(Path(script[0]).resolve().parent)
    try:
        runpy.run_path(script[0], run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if watches:
        Path(out).write_text(json.dumps(watches[0].seen()), encoding="utf-8")
        watches[0].attachment.abandon()


if __name__ == "__main__":
    main()
