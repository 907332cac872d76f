"""Whether a command of the documentation would be accepted, without what it starts once it is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer import testing
from typer.testing import CliRunner

from forked import run_forked
from pages import ROOT
from shoal.cli import app

ENDS = {
    "compare": "shoal.cli.comparison.compare_strategies",
    "demo": "shoal.demo.program.run_demo",
    "reproduce": "shoal.cli.reproduce.run_study",
    "run": "shoal.cli.launching.launch",
    "search": "shoal.cli.searching.run_search",
}
"""What each command calls once every argument was checked."""

LAUNCHERS = {"mpiexec", "torchrun"}
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")

STOP_AFTER_OPTIONS = """
import argparse, os.path, runpy, sys
read = argparse.ArgumentParser.parse_args
def stop(parser, *arguments, **options):
    read(parser, *arguments, **options)
    print("accepted")
    raise SystemExit
argparse.ArgumentParser.parse_args = stop
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def refusal(command: str) -> str | None:
    """Why the command would be refused in the current folder, or None. It starts nothing.

    Raises ValueError for a program whose arguments nobody here can judge.
    """
    if (judge := judge_of(command)) is None:
        raise ValueError(f"nobody can tell whether this is right without running it: {command}")
    return judge()


def judge_of(command: str) -> Callable[[], str | None] | None:
    """The function that judges the command, or None for a program that is not ours."""
    words = shlex.split(command, comments=True)
    while words and ASSIGNMENT.fullmatch(words[0]):
        del words[0]
    match launched(words) if words and words[0] in LAUNCHERS else words:
        case ["shoal", *arguments]:
            return partial(refused_by_shoal, arguments)
        case ["python", "-m", "pytest", *arguments]:
            return partial(refused_by_pytest, arguments)
        case ["python", script, *arguments] if script.endswith(".py"):
            return partial(refused_by_script, script, arguments)
        case ["make", *targets]:
            return partial(refused_by_make, targets)
    return None


def launched(words: list[str]) -> list[str]:
    """What a launcher starts: `shoal …`, `python …`, or a script, which torchrun gives to Python."""
    for place, word in enumerate(words):
        if word in ("shoal", "python"):
            return words[place:]
        if word.endswith(".py"):
            return ["python", *words[place:]]
    raise ValueError(f"this starts neither Python nor shoal: {shlex.join(words)}")


def refused_by_shoal(arguments: list[str]) -> str | None:
    name = next((word for word in arguments if not word.startswith("-")), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        for variable in ("SHOAL_PLACE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(variable, raising=False)
        if name not in ENDS:
            return refused_by_parser(name, arguments)
        reached: list[str] = []
        patch.setattr(ENDS[name], lambda *given, **options: reached.append(name))
        done = CliRunner().invoke(app, arguments)
    accepted = done.exit_code == 0 and (reached or "--help" in arguments)
    return None if accepted else done.output.strip() or str(done.exception)


def refused_by_parser(name: str, arguments: list[str]) -> str | None:
    """As far as the options themselves say, for commands that do at once what they are asked."""
    group = testing._get_command(app)
    try:
        if name:
            place = arguments.index(name)
            command = group.commands[name]  # type: ignore[attr-defined]
            command.make_context(name, arguments[place + 1 :], resilient_parsing=False).close()
        else:
            CliRunner().invoke(app, arguments, catch_exceptions=False)
    except KeyError:
        return f"shoal has no command {name!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused_by_script(script: str, arguments: list[str]) -> str | None:
    if not Path(script).is_file():
        return f"there is no {script}"
    if "argparse" not in Path(script).read_text(encoding="utf-8"):
        return None  # it reads sys.argv itself, as only small scripts do
    done = run_forked([sys.executable, "-c", STOP_AFTER_OPTIONS, script, *arguments], cwd=Path.cwd())
    return None if "accepted" in done.stdout else done.stderr.strip()


def refused_by_pytest(arguments: list[str]) -> str | None:
    line = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    return None if done.returncode == 0 else done.stdout[-500:]


def refused_by_make(targets: list[str]) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    line = ["make", "--dry-run", "--always-make", *targets]
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode == 0 else done.stderr.strip()
