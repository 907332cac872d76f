"""Which device a process computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from shoal.core.catalogue import check_word
from shoal.core.task import Task
from shoal.core.words import DEVICES

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable by which CUDA knows which GPUs a process may use."""


def choose_device(word: str) -> str:
    """The device for a word of DEVICES: cpu or cuda. Raises ValueError if there is no GPU to take."""
    check_word("device", word, DEVICES)
    if word == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if word == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch finds no GPU here; take 'cpu', or 'auto'")
    return word


def on_device(task: Task, word: str | None) -> Task:
    """The task with model and data on the device for a word; as it is without one."""
    device = task.device if word is None else choose_device(word)
    return task if device == task.device else task.on(device)


def take_gpu(rank: int) -> None:
    """Make a GPU the one that "cuda" means in this process: of several, each rank takes the next."""
    torch.cuda.set_device(rank % torch.cuda.device_count())


def gpus_for(word: str | None) -> list[str] | None:
    """The GPUs that workers of a script share out, as CUDA calls them: none on the processor.

    None without a word: then each sees all there are. Once CUDA has been asked, as here, it no longer looks
    which are visible: so do not call this in a worker.
    """
    if word is None:
        return None
    if choose_device(word) == "cpu":
        return []
    seen = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
    return seen.split(",")


def device_variables(gpus: Sequence[str] | None, rank: int) -> Mapping[str, str]:
    """The environment in which a worker sees its device alone."""
    if gpus is None:
        return {}
    return {VISIBLE: gpus[rank % len(gpus)] if gpus else ""}
