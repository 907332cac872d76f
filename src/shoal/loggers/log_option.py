"""What `--log tensorboard:runs/` stands for: a logger, made and checked before a run starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from shoal.core.catalogue import check_word
from shoal.core.errors import Unavailable
from shoal.loggers.logger import Logger


class BuiltIn(NamedTuple):
    """A built-in logger: its class, the package it needs, and what may follow the colon."""

    home: str
    needs: str
    where: str


WORDS = {
    "tensorboard": BuiltIn("shoal.loggers.tensorboard:TensorBoard", "tensorboard", "DIR"),
    "wandb": BuiltIn("shoal.loggers.wandb:WandB", "wandb", "PROJECT"),
    "mlflow": BuiltIn("shoal.loggers.mlflow:MLflow", "mlflow", "URI"),
    "csv": BuiltIn("shoal.loggers.csv_files:CSV", "", "DIR"),
}


def make_loggers(log: str | Logger | Iterable[str | Logger] | None) -> list[Logger]:
    """The loggers of one text or object, or of several.

    Raises ValueError for a word that is not known or a place that cannot be written, Unavailable for a
    package that is missing.
    """
    if log is None:
        return []
    several = [log] if isinstance(log, (str, Logger)) else list(log)
    for text in several:
        if isinstance(text, str):
            check_log(text)
    return [read_logger(text) if isinstance(text, str) else _checked(text) for text in several]


def check_log(text: str) -> None:
    """Raise what `read_logger` would, as far as that can be told without importing anything."""
    word, _, _ = text.partition(":")
    if "." in word:
        return
    check_word("logger", word, WORDS)
    if (needs := WORDS[word].needs) and find_spec(needs) is None:
        raise Unavailable(f"logger {word!r} needs {needs}. Install it with: pip install 'shoal[{word}]'")


def read_logger(text: str) -> Logger:
    """The logger of a text: `csv`, `csv:figures/`, or `my_module.MyLogger:argument` for a class of yours."""
    word, _, where = text.partition(":")
    if "." in word:
        return _own(word, where)
    module, _, name = WORDS[word].home.partition(":")
    logger: Logger = getattr(import_module(module), name)(where)
    return logger


def _own(path: str, where: str) -> Logger:
    """A class of the user's, imported as `python -m` would: the current folder comes first."""
    module, _, name = path.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"log {path}: {error}") from error
    return _checked(made(where) if where else made())


def _checked(logger: object) -> Logger:
    if not isinstance(logger, Logger):
        raise TypeError(f"{logger!r} is no logger: it needs the methods start, log and finish")
    return logger
