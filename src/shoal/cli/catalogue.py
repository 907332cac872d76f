"""`shoal list`: every word of the command line, where it comes from and which options it has."""

from __future__ import annotations

import inspect
import json as json_format
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.codecs import CODECS
from shoal.core.catalogue import Catalogue
from shoal.launch.join import COLLECTIVES, TRANSPORTS, check_word
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES
from shoal.studies import STUDIES
from shoal.topologies import TOPOLOGIES

KINDS = {
    "strategies": "how workers are kept together; options: --strategy.NAME VALUE",
    "topologies": "who talks to whom in which round: --strategy.topology WORD",
    "codecs": "how messages are compressed: --codec",
    "transports": "how bytes move: --transport",
    "collectives": "how averages are formed: --collective",
    "tasks": "what is trained: --task; options: --batch, --lr",
    "studies": "published tables made again: shoal reproduce WORD; options: WORD:NAME=VALUE",
}


@dataclass(frozen=True)
class Entry:
    """One word: what it is, whose idea it is, and the defaults of its options."""

    name: str
    about: str
    source: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def show(
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help=f"One of {', '.join(KINDS)}.")] = "",
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List every strategy, topology, codec, transport, collective, task and study with its source."""
    if kind:
        check_word("kind", kind, KINDS)
    listed = {name: list(entries(name)) for name in ([kind] if kind else KINDS)}
    if json:
        plain = {name: [asdict(entry) for entry in known] for name, known in listed.items()}
        print(json_format.dumps(plain, indent=1))
        return
    console = Console(highlight=False)
    for name, known in listed.items():
        console.print(Text.assemble((name, "bold"), ("  " + KINDS[name], "dim")))
        console.print(table(known))
        console.print()


def entries(kind: str) -> Iterator[Entry]:
    """Every word of one kind."""
    if kind == "strategies":
        yield from _made_here(STRATEGIES)
    elif kind == "topologies":
        for entry in _made_here(TOPOLOGIES):
            yield replace(entry, source="")
    elif kind == "codecs":
        yield from _made_here(CODECS)
    elif kind == "studies":
        for entry in _made_here(STUDIES):  # there None leaves something out; elsewhere it is auto
            told = {name: "none" if default is None else default for name, default in entry.options.items()}
            yield replace(entry, options=told)
    elif kind == "tasks":
        yield from _tasks()
    else:
        words: Mapping[str, str] = TRANSPORTS if kind == "transports" else COLLECTIVES
        for name, about in words.items():
            yield Entry(name, about)


def table(known: list[Entry]) -> Table:
    """Two columns: the word, and below each other its source, its meaning and its options."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold cyan", min_width=12)
    grid.add_column(overflow="fold")
    for entry in known:
        options = "  ".join(f"{name}={_text(default)}" for name, default in entry.options.items())
        lines = [Text(entry.source), Text(entry.about, "dim" if entry.source else ""), Text(options, "green")]
        grid.add_row(f"  {entry.name}", Text("\n").join(line for line in lines if line.plain))
    return grid


def _made_here(catalogue: Catalogue[Any]) -> Iterator[Entry]:
    for word, factory in catalogue.items():
        module = inspect.getmodule(factory)
        # what stands in the vocabulary itself is nobody's paper
        source = "" if module is None or module.__name__.startswith("shoal.core") else _first_line(module)
        options = {name: option.default for name, option in catalogue.options(word).items()}
        yield Entry(word, _first_line(factory), source, options)


def _tasks() -> Iterator[Entry]:
    for word, factory in TASKS.items():
        task = TASKS.make(word)
        source = (inspect.getdoc(inspect.getmodule(factory)) or "").split("\n\n")[-1]
        yield Entry(word, task.about, source.replace("\n", " "), {"batch": task.batch, "lr": task.lr})


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _text(default: Any) -> str:
    """A default as it would be typed on the command line."""
    return "auto" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
