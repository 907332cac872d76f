"""How the command line is read, and how what goes wrong is said: in one sentence."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from shoal.core.errors import Interrupted, ShoalError, WorkerFailed

DOTTED = "shoal.strategy_options"  # where a context keeps what --strategy.NAME said
PASSED = "shoal.passed_through"  # and what came after a bare --

Timeout = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="Silence after which a node gives up.")
]

Servers = Annotated[
    int,
    typer.Option(min=1, help="Processes that share the strategy's server, each with a slice of the model."),
]

Durability = Annotated[
    str, typer.Option(help="What a server that dies remembers: memory (its last snapshot) or journal (all).")
]

Collective = Annotated[
    str, typer.Option(metavar="WORD", help="How averages are formed; see: shoal list collectives.")
]

WRONG_ARGUMENTS, WORLD_FAILED, STOPPED = 2, 1, 130


class Commands(TyperGroup):
    """All commands. What they raise ends the process with one sentence and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False  # or typer would explain errors its own way
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            code = explain(error)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("stopped by Ctrl-C") from None


class StrategyCommand(TyperCommand):
    """A command with --strategy.NAME VALUE; which options there are, only the strategy knows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        taken, rest = take(args, lambda name: name.startswith("--strategy."))
        ctx.meta[DOTTED] = {
            name.removeprefix("--strategy.").replace("-", "_"): value for name, value in taken
        }
        return super().parse_args(ctx, rest)


class ScriptCommand(StrategyCommand):
    """A command that ends in a script with arguments of its own; strategy and codec may stand among those."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[PASSED] = args[end + 1 :]
        ours, rest = take(args[:end], {"--strategy", "--codec"}.__contains__)
        return super().parse_args(ctx, [*(word for pair in ours for word in pair), *rest])


def take(args: Sequence[str], wanted: Callable[[str], bool]) -> tuple[list[tuple[str, str]], list[str]]:
    """The wanted options, written `--name value` or `--name=value`, and the arguments that are left."""
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


def explain(error: Exception) -> int:
    """Say on stderr what went wrong, and give the exit code; what nobody foresaw is raised again."""
    if isinstance(error, WorkerFailed) and error.details:
        print(error.details.rstrip(), file=sys.stderr)
    if isinstance(error, (ShoalError, ValueError, TypeError)):
        sentence = str(error)
    elif isinstance(error, OSError):
        sentence = str(error.strerror or error) + (f": {error.filename}" if error.filename else "")
    elif hasattr(error, "format_message"):  # typer's own, whichever version of it
        sentence = error.format_message()
    else:
        raise error
    line = Text.assemble(("shoal: ", "bold red"), sentence)
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
    if isinstance(error, Interrupted):
        return STOPPED
    return WORLD_FAILED if isinstance(error, (ShoalError, OSError)) else WRONG_ARGUMENTS
