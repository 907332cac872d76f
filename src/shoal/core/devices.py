"""Which device a process computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

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


def device_variables(word: str | None, rank: int) -> Mapping[str, str]:
    """The environment in which a script of the user's sees its device alone; nothing without a word."""
    if word is None:
        return {}
    if choose_device(word) == "cpu":
        return {VISIBLE: ""}
    seen = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = seen.split(",")
    return {VISIBLE: gpus[rank % len(gpus)]}
