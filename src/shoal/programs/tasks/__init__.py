"""Built-in tasks: a model with its data, by name."""

from __future__ import annotations

from shoal.core.catalogue import Catalogue
from shoal.core.task import Task
from shoal.programs.tasks import caltech, digits, images, shakespeare, speech

TASKS: Catalogue[Task] = Catalogue(
    "task",
    {
        "digits": digits.digits,
        "mnist": images.mnist,
        "mnist-cnn": images.mnist_cnn,
        "fashion-mnist": images.fashion_mnist,
        "caltech": caltech.caltech,
        "caltech-large": caltech.caltech_large,
        "shakespeare": shakespeare.shakespeare,
        "speech": speech.speech_dnn,
        "speech-dblstm": speech.speech_dblstm,
        "speech-csc": speech.speech_csc,
    },
)
"""Each factory is importable and needs no arguments; making a Task loads no data."""

__all__ = ["TASKS"]
