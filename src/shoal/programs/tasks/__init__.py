"""Built-in tasks: a model with its data, by name. A file is imported when its task is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.core.task import Task

TASKS: Catalogue[Task] = Catalogue(
    "task",
    {
        "digits": "shoal.programs.tasks.digits:digits",
        "digit-pairs": "shoal.programs.tasks.digits:digit_pairs",
        "mnist": "shoal.programs.tasks.images:mnist",
        "mnist-cnn": "shoal.programs.tasks.images:mnist_cnn",
        "mnist-deep": "shoal.programs.tasks.images:mnist_deep",
        "fashion-mnist": "shoal.programs.tasks.images:fashion_mnist",
        "caltech": "shoal.programs.tasks.caltech:caltech",
        "caltech-alexnet": "shoal.programs.tasks.caltech:caltech_alexnet",
        "caltech-large": "shoal.programs.tasks.caltech:caltech_large",
        "shakespeare": "shoal.programs.tasks.shakespeare:shakespeare",
        "speech": "shoal.programs.tasks.speech:speech_dnn",
        "speech-dblstm": "shoal.programs.tasks.speech:speech_dblstm",
        "speech-csc": "shoal.programs.tasks.speech:speech_csc",
    },
)
"""Every factory can be called without arguments. Making a Task loads no data."""

__all__ = ["TASKS"]
