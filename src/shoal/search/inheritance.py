"""Inheritance: a trial goes on from another's checkpoint, with other hyper-parameters.

Weights, the optimizer's state, buffers, random streams and the data cursor are copied bit for bit. What
changes is what the new values say: the numbers in the optimizer's groups and, for one worker, the batch; the
cursor then stays at the same epoch, which is where pieces end.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.core.errors import CheckpointError
from shoal.core.task import Data
from shoal.replicas.optimizer import Schedule
from shoal.runs.plan import Plan
from shoal.storage.checkpoint import NO_STEP, Checkpoints
from shoal.storage.whole_files import sync_folder


def inherit(source: Path, old: Plan, target: Path, new: Plan, data: Data) -> None:
    """Write the newest checkpoint of `source` to the new folder `target`, as one of the plan `new`.

    All or nothing: `target` appears complete. Both plans must be of the same model and the same nodes.
    """
    read = _checkpoints(source, old, data)
    nodes = [old.identity(rank) for rank in range(old.nodes)]
    step = read.latest(nodes)
    if step == NO_STEP:
        raise CheckpointError(f"there is no whole checkpoint in {source} to go on from")
    epochs = _epochs_at(step, old, data)
    now = new.steps(data) // new.epochs * epochs if epochs is not None else step
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of an attempt that was killed
    write = _checkpoints(part, new, data)
    for me in nodes:
        state = read.read(step, me)
        _adopt(state, new, data, now)
        write.write(now, me, state)
    part.rename(target)
    sync_folder(target.parent)


def _checkpoints(folder: Path, plan: Plan, data: Data) -> Checkpoints:
    found = replace(plan, checkpoint=str(folder)).checkpoints(data)
    assert found is not None
    return found


def _epochs_at(step: int, plan: Plan, data: Data) -> int | None:
    """The epochs that are done at a step of a run of one node; None for others, whose batch is fixed."""
    if plan.nodes > 1:
        return None
    each = plan.steps(data) // plan.epochs
    if step % each:
        raise CheckpointError(f"step {step} is not the end of an epoch of {each} steps")
    return step // each


def _adopt(state: dict[str, Any], plan: Plan, data: Data, step: int) -> None:
    """Change the state to what the plan says: the optimizer's options, and the cursor in its batches."""
    replica, task = state["replica"], plan.scaled_task(data)
    fresh = task.optimizer([nn.Parameter(torch.zeros(1))], lr=task.lr)
    (group,) = fresh.state_dict()["param_groups"]
    for saved in replica.get("optimizer", {}).get("param_groups", ()):
        saved |= {name: value for name, value in group.items() if name != "params"}
    for schedule in replica.get("schedules", ()):  # of a server
        schedule["now"] = schedule["followed"] = Schedule(fresh).numbers()
    if plan.nodes == 1:
        replica["position"] = step
        state["progress"] |= {"step": step, "clock": step}
