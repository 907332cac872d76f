"""`import shoal` is quick: a public name is imported on first use, and all of them are there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

DOOR = Path(shoal.__file__)


def test_every_public_name_is_told_to_type_checkers_and_found_at_run_time():
    tree = ast.parse(DOOR.read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        for alias in node.names
    }
    assert told == shoal._HOMES
    assert sorted(told) == shoal.__all__


def test_star_import_and_dir_give_every_public_name():
    names: dict[str, object] = {}
    exec("from shoal import *", names)
    assert {*shoal.__all__} <= names.keys()
    assert {*shoal.__all__, "__version__"} <= {*dir(shoal)}


def test_the_classes_behind_words_need_no_import_of_their_own():
    code = "import shoal; print(shoal.strategies.SSP(bound=0), shoal.codecs.TopK(), shoal.sim.Network().loss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout == "SSP(bound=0) TopK(density=0.01, feedback='residual') 0.0\n", done.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'Bmuf'"):
        shoal.Bmuf  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Bmuf'"):
        from shoal import Bmuf  # noqa: F401


def test_importing_shoal_and_its_tables_does_not_import_torch():
    tables = ["strategies", "codecs", "programs.tasks", "studies", "topologies", "sim.models"]
    imports = ", ".join(["sys", "shoal", *(f"shoal.{table}" for table in tables)])
    code = f"import {imports}; dir(shoal); print({{'torch', 'numpy'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert (done.stdout, done.stderr) == ("set()\n", "")
