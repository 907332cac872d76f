"""How the command line is read, and how an error becomes one sentence and an exit code."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.core.errors import Interrupted, ShoalError, WorkerFailed
from shoal.launch.stop_signals import StopSignal, number_of, stopped_by

DOTTED = "shoal.strategy_options"  # where a context keeps the values of --strategy.NAME
WORDS = "shoal.words"  # the words of the command line
ADDRESS = "shoal.address"  # the address of a run, in a list that is empty if there is none
PASSED = "shoal.passed_through"  # and the words after a bare --

Timeout = Annotated[
    float,
    typer.Option(
        min=0.1, metavar="SECONDS", help="A node that hears nothing from its peers for so long gives up."
    ),
]

Patience = Annotated[
    float,
    typer.Option(
        min=1.0,
        metavar="SECONDS",
        help="A process or a peer on another host that is silent for so long is dead.",
    ),
]

MinWorkers = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Where workers come and go, training waits while there are fewer."),
]

SpareProcesses = Annotated[
    int,
    typer.Option("--spares", min=0, metavar="N", help="Processes that wait to replace killed workers."),
]

MaxWorkers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Over grpc: let others join with shoal join, up to so many workers.",
        show_default="the workers that are started",
    ),
]

Servers = Annotated[
    int,
    typer.Option(min=1, help="Server processes of the strategy, each with a slice of the model."),
]

Device = Annotated[
    str,
    typer.Option(metavar="WORD", help="cpu, cuda (of several GPUs each worker takes the next), or auto."),
]

Durability = Annotated[
    str,
    typer.Option(
        metavar="WORD",
        help="What a server that died recovers: memory (its last snapshot) or journal (every update).",
    ),
]

Collective = Annotated[
    str, typer.Option(metavar="WORD", help="How averages are formed; see: shoal list collectives.")
]

USAGE_ERROR, RUNTIME_FAILURE = 2, 1
INTERRUPTED = 128
"""The exit code after a signal, less the signal's number: 130 for Ctrl-C, 143 for SIGTERM."""


def check_servers(word: str, needed: int, servers: int) -> None:
    """Raise ValueError for several servers of a strategy that needs none."""
    if servers > 1 and not needed:
        raise ValueError(f"--servers {servers} belongs to a strategy with a server, and {word!r} has none")


class _PlainFlags:
    """A mixin: help shows flags such as --quiet without a value, and a --help that is not given is False.

    Typer's own default for --help is None, and to convert that it would import pydantic.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class Commands(_PlainFlags, TyperGroup):
    """All commands. An exception ends the process with one sentence and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False  # or typer would print errors in its own way
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            code = explain(error)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise stopped_by(number_of(stop)) from None
        except Interrupted:
            raise
        except Exception as error:
            if (cause := signal_behind(error)) is None:
                raise
            raise stopped_by(cause.number) from None


class CommandGroup(_PlainFlags, TyperGroup):
    """Commands under one word, such as shoal manifest."""


class Command(_PlainFlags, TyperCommand):
    """A command."""


class StrategyCommand(Command):
    """A command with --strategy.NAME VALUE; the strategy decides which names there are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        taken, rest = take(args, lambda name: name.startswith("--strategy."))
        ctx.meta[DOTTED] = {
            name.removeprefix("--strategy.").replace("-", "_"): value for name, value in taken
        }
        return super().parse_args(ctx, rest)


class JoinCommand(Command):
    """A command with an address, before or after its options, that may end in a script and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, words, _ = self.make_parser(ctx).parse_args(list(args))  # from the first that is no option's
        ctx.meta[ADDRESS] = words[:1]
        return super().parse_args(ctx, [*args[: len(args) - len(words)], *words[1:]])


class ScriptCommand(StrategyCommand):
    """A command that ends in a script and its arguments. --strategy and --codec may be among those."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[PASSED] = args[end + 1 :]
        ours, rest = take(args[:end], {"--strategy", "--codec"}.__contains__)
        return super().parse_args(ctx, [*(word for pair in ours for word in pair), *rest])


def take(args: Sequence[str], wanted: Callable[[str], bool]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split off the wanted options, written `--name value` or `--name=value`, from the other arguments."""
    taken: list[tuple[str, str]] = []
    rest: list[str] = []
    queue = deque(args)
    while queue:
        arg = queue.popleft()
        name, given, value = arg.partition("=")
        if not wanted(name):
            rest.append(arg)
            continue
        if not given:
            if not queue or queue[0].startswith("--"):
                raise ValueError(f"{name} needs a value")
            value = queue.popleft()
        taken.append((name, value))
    return taken, rest


def signal_behind(error: BaseException | None) -> StopSignal | None:
    """The signal that led to this error, as where it came while a library was imported."""
    while error is not None and not isinstance(error, StopSignal):
        error = error.__cause__ or error.__context__
    return error


def explain(error: Exception) -> int:
    """Print an error as one sentence on stderr and return the exit code; raise an unexpected one again."""
    from rich.console import Console
    from rich.text import Text

    if isinstance(error, WorkerFailed) and error.details:
        print(error.details.rstrip(), file=sys.stderr)
    if isinstance(error, (ShoalError, ValueError, TypeError)):
        sentence = str(error)
    elif isinstance(error, OSError):
        sentence = str(error.strerror or error) + (f": {error.filename}" if error.filename else "")
    elif hasattr(error, "format_message"):  # a usage error of typer, whichever its version
        sentence = error.format_message()
    else:
        raise error
    line = Text.assemble(("shoal: ", "bold red"), sentence)
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
    if isinstance(error, Interrupted):
        return INTERRUPTED + error.signal
    return RUNTIME_FAILURE if isinstance(error, (ShoalError, OSError)) else USAGE_ERROR
