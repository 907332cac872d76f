"""epochs(): a training loop that attaches before its first epoch and finishes after its last."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeAlias

from torch import nn

from shoal.api.attach import attach
from shoal.api.attachment import Attachment

Settings = ParamSpec("Settings")
Count: TypeAlias = "int | Iterable[Any]"


def _takes_the_settings_of(
    function: Callable[Settings, Attachment],
) -> Callable[[Callable[..., Iterator[Any]]], Callable[Concatenate[Count, Settings], Iterator[Any]]]:
    """Give the signature of `function`, behind the first parameter, to what is decorated."""

    def decorate(loop: Callable[..., Iterator[Any]]) -> Callable[Concatenate[Count, Settings], Iterator[Any]]:
        own, theirs = inspect.signature(loop), inspect.signature(function)
        first = next(iter(own.parameters.values()))
        loop.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[first, *theirs.parameters.values()]
        )
        return loop

    return decorate


@_takes_the_settings_of(attach)
def epochs(count: Count, *arguments: Any, **options: Any) -> Iterator[Any]:
    """The epochs of a training loop: `for epoch in shoal.epochs(5, model, optimizer):`.

    `count` is a number of epochs, or any iterable, whose items you get. The other arguments are those of
    `attach`, which this calls at once. After the last epoch it calls `finish()`: behind the loop the model
    holds the trained parameters. If you leave the loop earlier, by `break`, `return` or an exception, a
    warning says that the run is finished only when the script ends. To stop early, or to evaluate the common
    model inside the loop, call `attach` and `finish` yourself.
    """
    if isinstance(count, nn.Module):
        raise TypeError(
            "the first argument of epochs() is how many there are: epochs(5, model, optimizer), not a model"
        )
    planned = iter(range(count) if isinstance(count, int) else count)
    return _finishing(planned, attach(*arguments, **options))


def _finishing(planned: Iterator[Any], training: Attachment) -> Iterator[Any]:
    begun = 0
    try:
        for epoch in planned:
            begun += 1
            yield epoch
    except GeneratorExit:  # finish() would wait for other workers, in the midst of a `break` or an exception
        if not training.failed:
            warnings.warn(
                f"the loop over shoal.epochs() was left in epoch {begun}, before its end: the model holds "
                "this worker's own parameters, and training is finished only when the script ends. To stop "
                "early, call training = shoal.attach(...) before the loop and training.finish() after it.",
                stacklevel=2,
            )
        raise
    training.finish()
