"""What the command line of `python` does, in a process that has imported much already."""

from __future__ import annotations

import os
import runpy
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

COLD_PYTHON = sys.executable  # where this is imported first; in warm programs sys.executable is one, too
BASE_PYTHON = sys._base_executable  # type: ignore[attr-defined]


def be_as_if_cold() -> None:
    """Let sys.executable be a Python that starts cold."""
    sys.executable, sys._base_executable = COLD_PYTHON, BASE_PYTHON  # type: ignore[attr-defined]


def run_python(arguments: Sequence[str]) -> None:
    """Do what `python *arguments` would, until the program ends or raises."""
    line = list(arguments)
    while line and line[0].startswith("-") and line[0] not in ("-", "-c", "-m"):
        _set_option(line)
    if not line or line[0] == "-":
        _execute(sys.stdin.read(), "<stdin>", line or [""])
    elif line[0] == "-c":
        _execute(line[1], "<string>", ["-c", *line[2:]])
    elif line[0] == "-m":
        sys.argv = line[1:]
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        sys.modules.pop(line[1], None)  # it runs anew, as __main__
        runpy.run_module(line[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = line
        sys.path.insert(0, str(Path(line[0]).resolve().parent))
        runpy.run_path(line[0], run_name="__main__")


def _set_option(line: list[str]) -> None:
    """Take an option of the interpreter off the line. Those that make no difference here are passed over."""
    option = line.pop(0)
    if option in ("-W", "-X"):
        option += line.pop(0)
    if option.startswith("-W"):
        warnings._setoption(option[2:])  # type: ignore[attr-defined]


def _execute(text: str, name: str, argv: list[str]) -> None:
    sys.argv = argv
    sys.path.insert(0, "")
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(text, name, "exec"), main.__dict__)
