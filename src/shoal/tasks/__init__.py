"""Built-in tasks: a model with its data, by name."""

from __future__ import annotations

from shoal.core.catalogue import Catalogue
from shoal.core.task import Task
from shoal.tasks import digits, images

TASKS: Catalogue[Task] = Catalogue(
    "task",
    {
        "digits": digits.digits,
        "mnist": images.mnist,
        "fashion-mnist": images.fashion_mnist,
    },
)
"""Each factory is importable and takes no arguments; making a Task loads no data."""

__all__ = ["TASKS"]
