"""`shoal list`: every word of the command line with its source and options, read without importing torch."""

from __future__ import annotations

import gc
import json as json_format
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.codecs import CODECS
from shoal.core.catalogue import Catalogue, check_word
from shoal.core.words import COLLECTIVES, DURABILITY, TRANSPORTS
from shoal.layouts import LAYOUTS
from shoal.loggers.log_option import WORDS as LOGGERS
from shoal.programs.tasks import TASKS
from shoal.search import METHODS
from shoal.strategies import STRATEGIES
from shoal.studies import STUDIES

if TYPE_CHECKING:
    from rich.table import Table

KINDS = {
    "strategies": "how workers are kept together; options: --strategy.NAME VALUE",
    "topologies": "who talks to whom in each round: --strategy.topology WORD:NAME=VALUE",
    "layouts": "how a model lies in a worker's processes: shoal compare --layouts WORD:NAME=VALUE",
    "codecs": "how messages are compressed: --codec WORD:NAME=VALUE",
    "transports": "how bytes move: --transport WORD",
    "collectives": "how averages are formed: --collective WORD",
    "durability": "what a server that died recovers: --durability WORD",
    "loggers": "where figures go besides the run's folder: --log WORD:WHERE",
    "tasks": "what is trained: --task WORD; options: --batch, --lr",
    "methods": "how a search looks for hyper-parameters: shoal search --method WORD:NAME=VALUE",
    "studies": "published tables, made again: shoal reproduce WORD:NAME=VALUE",
}


@dataclass(frozen=True)
class Entry:
    """One word: a line about it, its source, and the defaults of its options."""

    name: str
    about: str
    source: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def show(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the words that the commands take, with their sources and options.

    KIND is strategies, topologies, layouts, codecs, transports,
    collectives, durability, loggers, tasks, methods or studies. Without
    one, all are listed.
    """
    for kind in ctx.args:
        check_word("kind", kind, KINDS)
    gc.disable()  # the answer is short, and looking for garbage would be a tenth of its time
    try:
        _print({kind: list(entries(kind)) for kind in ctx.args or KINDS}, json)
    finally:
        gc.enable()


def _print(listed: Mapping[str, list[Entry]], json: bool) -> None:
    if json:
        plain = {name: [asdict(entry) for entry in known] for name, known in listed.items()}
        print(json_format.dumps(plain, indent=1))
        return

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for name, known in listed.items():
        console.print(Text.assemble((name, "bold"), ("  " + KINDS[name], "dim")))
        console.print(table(known, console.width))
        console.print()


def entries(kind: str) -> Iterator[Entry]:
    """Every word of one kind."""
    if kind == "strategies":
        yield from _declared(STRATEGIES)
    elif kind == "topologies":
        from shoal.topologies import TOPOLOGIES

        for entry in _declared(TOPOLOGIES):
            yield replace(entry, source="")
    elif kind == "layouts":
        yield from _declared(LAYOUTS)
    elif kind == "codecs":
        yield from _declared(CODECS)
    elif kind == "methods":
        yield from _declared(METHODS)
    elif kind == "studies":
        for entry in _declared(STUDIES):  # None omits a part of a study; elsewhere it means auto
            told = {name: "none" if default is None else default for name, default in entry.options.items()}
            yield replace(entry, options=told)
    elif kind == "tasks":
        yield from _tasks()
    else:
        words: Mapping[str, str] = {
            "transports": TRANSPORTS,
            "collectives": COLLECTIVES,
            "durability": DURABILITY,
            "loggers": {word: logger.about for word, logger in LOGGERS.items()},
        }[kind]
        for name, about in words.items():
            yield Entry(name, about)


def table(known: list[Entry], width: int) -> Table:
    """Two columns: the word, and below each other its source, a line about it and its options."""
    from rich.table import Table
    from rich.text import Text

    words = max(12, *(2 + len(entry.name) for entry in known))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold cyan", width=words)  # widths are known: to measure takes time
    grid.add_column(overflow="fold", width=max(20, width - words - 2))
    for entry in known:
        options = "  ".join(f"{name}={_text(default)}" for name, default in entry.options.items())
        lines = [Text(entry.source), Text(entry.about, "dim" if entry.source else ""), Text(options, "green")]
        grid.add_row(f"  {entry.name}", Text("\n").join(line for line in lines if line.plain))
    return grid


def _declared(catalogue: Catalogue[Any]) -> Iterator[Entry]:
    for word in catalogue:
        found = catalogue.declaration(word)
        is_core = found.module.startswith("shoal.core")  # which comes from no paper
        options = {
            name: option.default
            for name, option in found.options.items()
            if object not in option.kinds  # a function, say, which only Python can give
        }
        yield Entry(word, _first_line(found.doc), "" if is_core else _first_line(found.module_doc), options)


def _tasks() -> Iterator[Entry]:
    for word in TASKS:
        found = TASKS.declaration(word)
        source = found.module_doc.split("\n\n")[-1].replace("\n", " ")
        task = found.returned  # the arguments of the Task that the function makes
        yield Entry(word, task["about"], source, {"batch": task["batch"], "lr": task["lr"]})


def _first_line(doc: str) -> str:
    return doc.partition("\n")[0]


def _text(default: Any) -> str:
    """A default as it would be typed on the command line."""
    return "auto" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
