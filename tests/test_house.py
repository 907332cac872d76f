"""The rules of the house, read off the source: who imports whom, what is forbidden where, how long a page is.

A rule is a function from one source file to its offences. CONTROLS holds, for each rule, a file that breaks
it and must be caught; HARMLESS holds what looks like an offence and is none.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest
import torch

HOUSE = Path(__file__).parent.parent / "src" / "shoal"
ENGINE_TESTS = Path(__file__).parent / "engine"
FRONT = "__init__"  # the room of shoal/__init__.py itself

_LOW = {
    "core",
    "kernels",
    "chunks",
    "engine",
    "vocabulary",
    "topologies",
    "lbfgs",
    "strategies",
    "codecs",
    "collectives",
}
_PARTS = _LOW | {"sim", "transports", "replicas", "storage", "programs"}
_STARTED = _PARTS | {"launch", "runs", "layouts"}
_KEPT = {"loggers", "records"}

MAY_IMPORT = {  # room -> the other rooms it may import; no two rooms import each other
    "core": set(),
    "engine": {"core"},
    "vocabulary": {"core", "engine"},
    "topologies": {"core"},
    "lbfgs": {"core", "engine", "vocabulary"},
    "kernels": set(),
    "chunks": {"core", "kernels"},
    "strategies": {"core", "chunks", "engine", "vocabulary", "topologies", "lbfgs"},
    "codecs": {"core", "kernels"},
    "collectives": {"core", "engine", "vocabulary"},
    "sim": {"core", "engine", "vocabulary", "collectives"},
    "transports": {"core", "collectives"},
    "replicas": _LOW,
    "storage": _LOW | {"transports"},
    "programs": _LOW,
    "launch": _PARTS,
    "runs": _PARTS | {"launch", "layouts"},
    "integrations": _STARTED | {"api"},
    "report": {"core"},
    "pipelines": {"core", "collectives", "sim", "report"},
    "layouts": _LOW | {"replicas", "programs", "pipelines", "sim"},
    "loggers": {"core"},
    "records": {"core", "loggers", "report"},
    "watch": {"core", "records", "report"},
    "manifests": {"core"},
    "profiling": _STARTED,
    "api": _STARTED | _KEPT | {"pipelines", "profiling"},
    "ray": _STARTED | {"api"},
    "studies": _STARTED | {"api", "planning", "report", "profiling", FRONT},
    "search": _STARTED | _KEPT | {"report"},
    "planning": _STARTED | {"api", "profiling", "report"},
    "demo": _STARTED | {"api", "planning", "profiling", "report", "studies"},
    "testing": _STARTED | {"api", "report", FRONT},
    "cli": _STARTED
    | _KEPT
    | {
        "api",
        "planning",
        "profiling",
        "report",
        "watch",
        "manifests",
        "ray",
        "testing",
        "studies",
        "demo",
        "pipelines",
        "search",
        FRONT,
    },
    FRONT: _STARTED | _KEPT | {"api", "planning"},
    "__main__": {"cli", "launch"},  # what Ctrl-C does while the command line is imported
}

DETERMINISTIC = {"core", "kernels", "chunks", "engine", "vocabulary", "lbfgs", "strategies", "codecs"}
NONDETERMINISTIC_MODULES = {
    *("asyncio", "threading", "multiprocessing", "concurrent", "socket", "pickle"),
    *("time", "datetime", "random", "secrets", "uuid", "numpy.random"),
    *("torch.distributed", "torch.multiprocessing"),
}
GLOBAL_RANDOM_STATE = {
    *("torch.manual_seed", "torch.seed", "torch.initial_seed", "torch.random", "torch.default_generator"),
    *("torch.get_rng_state", "torch.set_rng_state", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
}
DRAWS = re.compile(
    r"torch\.(rand\w*|normal|bernoulli|multinomial|poisson)"
    r"|torch\.nn\.init\.\w+_"
    r"|.*\.(normal|uniform|bernoulli|exponential|geometric|cauchy|log_normal|random)_"
)
RUNS_CODE = {"pickle", "cPickle", "_pickle", "marshal", "cloudpickle", "dill", "shelve", "torch.load"}
OBJECT_COLLECTIVE = re.compile(r"\w*(gather|broadcast|scatter|send|recv)_object\w*")
NOT_A_NOUN = re.compile(r"utils?|utilit(y|ies)|helpers?|common|misc|managers?")

MOST_LINES = 400
MOST_BODY_LINES = 40
MOST_EXPORTS = 40


@dataclass(frozen=True)
class Import:
    """`import target as name`; a plain `import a.b` binds `a` to itself and so renames nothing."""

    line: int
    target: str
    name: str | None = None


@dataclass(frozen=True)
class Source:
    """One file of the house, by its path inside it."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, in no order."""
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return self.path.parts[0].removesuffix(".py")

    @property
    def package(self) -> list[str]:
        """The package that relative imports in this file start from."""
        return ["shoal", *self.path.parts[:-1]]

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, also inside functions, and what importlib is asked for by a literal."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, a.name, a.asname) for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [Import(node.lineno, f"{base}.{a.name}", a.asname or a.name) for a in node.names]
            elif isinstance(node, ast.Call) and (name := literal_import(node)):
                found.append(Import(node.lineno, name))
        return found

    @property
    def imported(self) -> list[tuple[int, str]]:
        return [(i.line, i.target) for i in self.imports]

    def _absolute(self, node: ast.ImportFrom) -> str:
        above = self.package[: len(self.package) - node.level + 1] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])

    @cached_property
    def uses(self) -> list[tuple[int, str, ast.Call | None]]:
        """(line, dotted thing with import aliases resolved, the call if it is called) for every name used."""
        bound = {i.name: i.target for i in self.imports if i.name}
        called = {id(node.func): node for node in self.nodes if isinstance(node, ast.Call)}
        return [
            (node.lineno, dotted(node, bound), called.get(id(node)))
            for node in self.nodes
            if isinstance(node, ast.Name | ast.Attribute)
        ]

    def offence(self, line: int, what: str) -> str:
        return f"{self.path}:{line}: {what}"


def literal_import(call: ast.Call) -> str | None:
    name = dotted(call.func, {}).rpartition(".")[2]
    if name in ("import_module", "__import__") and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return None


def dotted(node: ast.AST, bound: dict[str, str]) -> str:
    """`torch.nn.init.zeros_` of such a chain; what is not a plain name at its root is written as nothing."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, bound)}.{node.attr}"
    return ""


def within(name: str, modules: set[str]) -> bool:
    return any(name.startswith(m) and name[len(m) :][:1] in ("", ".") for m in modules)


# ------------------------------------------------------------------------------------------------ the rules


def layering(source: Source) -> Iterator[str]:
    if source.room not in MAY_IMPORT:
        yield source.offence(1, f"room {source.room!r} has no place in MAY_IMPORT")
        return
    for line, target in source.imported:
        root, _, rest = target.partition(".")
        if root != "shoal":
            continue
        first, _, inside = rest.partition(".")
        room = (
            first if inside or first in MAY_IMPORT else FRONT
        )  # `from shoal import run` comes from the front
        if room != source.room and room not in MAY_IMPORT[source.room]:
            yield source.offence(line, f"{source.room} may not import {room} ({target})")


def strategies_stand_alone(source: Source) -> Iterator[str]:
    if source.room != "strategies" or source.path.name == "__init__.py":
        return
    for line, target in source.imported:
        if within(target, {"shoal.strategies"}):
            yield source.offence(line, f"a strategy may not import another ({target})")


def core_needs_torch_alone(source: Source) -> Iterator[str]:
    if source.room != "core":
        return
    for line, target in source.imported:
        if target.partition(".")[0] not in sys.stdlib_module_names | {"torch", "shoal"}:
            yield source.offence(line, f"core imports torch and the standard library only ({target})")


def determinism(source: Source) -> Iterator[str]:
    if source.room not in DETERMINISTIC:
        return
    roots = {target.partition(".")[0] for _, target in source.imported}  # else it is a variable called `time`
    for line, name in sorted({*source.imported, *((line, name) for line, name, _ in source.uses)}):
        if name.partition(".")[0] in roots and within(name, NONDETERMINISTIC_MODULES):
            yield source.offence(line, f"{source.room} may not use {name}")


def no_global_random_state(source: Source) -> Iterator[str]:
    if source.room not in DETERMINISTIC:
        return
    for line, name, call in source.uses:
        if within(name, GLOBAL_RANDOM_STATE):
            yield source.offence(line, f"{name} is global random state")
        elif call and DRAWS.fullmatch(name) and "generator" not in {k.arg for k in call.keywords}:
            yield source.offence(line, f"{name}() without generator= draws from global random state")


def nothing_runs_code_from_bytes(source: Source) -> Iterator[str]:
    for line, target in source.imported:
        if within(target, RUNS_CODE):
            yield source.offence(line, f"imports {target}, which can run code from bytes")
    for line, name, call in source.uses:
        if within(name, {"torch.load"}) or OBJECT_COLLECTIVE.fullmatch(name.rpartition(".")[2]):
            yield source.offence(line, f"{name} unpickles")
        elif call and name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            yield source.offence(line, f"calls {name}()")


def things_live_with_their_noun(source: Source) -> Iterator[str]:
    if bad := vague_words(source.path.with_suffix("").parts):
        yield source.offence(1, f"a file or folder called {bad}")
    for line, target in source.imported:
        module = target.split(".") if target.startswith("shoal.") else []
        if bad := vague_words(module):
            yield source.offence(line, f"imports from {bad} ({target})")


def vague_words(names: tuple[str, ...] | list[str]) -> str | None:
    words = [word for name in names for word in name.lower().split("_")]
    return next((word for word in words if NOT_A_NOUN.fullmatch(word)), None)


def files_fit_their_page(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MOST_LINES:
        yield source.offence(lines, f"{lines} lines, at most {MOST_LINES}: a part has lost its noun")


def engine_knows_no_node(source: Source) -> Iterator[str]:
    if source.room != "engine":
        return
    for node in source.nodes:
        names = [node.id] if isinstance(node, ast.Name) else []
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name.rpartition(".")[2] for alias in node.names]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes
            names = (
                re.findall(r"\w+", node.value)
                if re.fullmatch(r"[\w.\[\]]+( \| [\w.\[\]]+)*", node.value)
                else []
            )
        if "Node" in names:
            yield source.offence(getattr(node, "lineno", 1), "a part of the engine names Node")


def parts_have_tests(source: Source) -> Iterator[str]:
    """A part of the engine that has state has a test file that builds it, and none that needs a Node."""
    if source.room != "engine":
        return
    parts = {
        node.name
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and any(getattr(f, "name", "") == "__init__" for f in node.body)
    }
    tests = ENGINE_TESTS / f"test_{source.path.stem}.py"
    text = tests.read_text() if tests.exists() else ""
    if parts and not ("from parts import" in text or any(f"{part}(" in text for part in parts)):
        yield source.offence(1, f"no {tests.name} in tests/engine builds {', '.join(sorted(parts))}")
    if parts and NEEDS_NODE.search(text):
        yield source.offence(1, f"{tests.name} needs a Node")


NEEDS_NODE = re.compile(r"^(from|import) (test_node|shoal\.vocabulary\.node)\b", re.MULTILINE)
VALUES = {"x", "rng", "active", "others"}  # attributes of a node that are plain values: tensors and sets


def strategies_use_verbs(source: Source) -> Iterator[str]:
    """A strategy reaches for nothing behind a verb of its node, and does not see the end of the data."""
    if source.room != "strategies":
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            holder = node.value.value
            is_node = isinstance(holder, ast.Name) and holder.id in ("w", "s", "node")
            is_node |= isinstance(holder, ast.Attribute) and holder.attr in ("_w", "_s", "_node")
            if is_node and node.value.attr not in VALUES:
                yield source.offence(node.lineno, f"reaches through .{node.value.attr}.{node.attr}")
        if isinstance(node, ast.Name | ast.alias) and (
            getattr(node, "id", None) or getattr(node, "name", "")
        ) in (
            "NoMoreSteps",
            "shoal.core.replica.NoMoreSteps",
        ):
            yield source.offence(getattr(node, "lineno", 1), "a strategy deals with the end of the data")


def functions_are_short(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > MOST_BODY_LINES:
                yield source.offence(
                    node.lineno, f"{node.name}() has {lines} lines, at most {MOST_BODY_LINES}"
                )


def export_faults(module: types.ModuleType) -> Iterator[str]:
    names = list(getattr(module, "__all__", ()))
    if not names:
        yield "__all__ is missing or empty"
    if names != sorted(names):
        yield f"__all__ is not sorted; it should be {sorted(names)}"
    if len(names) > MOST_EXPORTS:
        yield f"{len(names)} public names, at most {MOST_EXPORTS}"
    for name in names:
        if not hasattr(module, name):
            yield f"{name} does not exist"
        elif lacks_docstring(getattr(module, name)):
            yield f"{name} has no docstring"


def lacks_docstring(thing: object) -> bool:
    if not isinstance(thing, type | types.FunctionType | types.ModuleType):
        return False  # a constant; its type has one
    doc = thing.__doc__ or ""
    return not doc.strip() or doc.startswith(f"{thing.__name__}(")  # the latter is what dataclass makes up


# ------------------------------------------------------------------------------------------------ the tests

Rule = Callable[[Source], Iterator[str]]


@cache
def house() -> list[Source]:
    return [
        Source(PurePosixPath(file.relative_to(HOUSE).as_posix()), file.read_text(encoding="utf-8"))
        for file in sorted(HOUSE.rglob("*.py"))
    ]


def assert_kept(rule: Rule) -> None:
    offences = [offence for source in house() for offence in rule(source)]
    assert not offences, f"{len(offences)} against {rule.__name__}:\n" + "\n".join(offences)


def test_the_walk_finds_the_house():
    assert {"core/errors.py", "core/transport.py"} <= {str(source.path) for source in house()}


def test_a_room_imports_only_the_rooms_before_it():
    assert_kept(layering)


def test_strategies_do_not_import_one_another():
    assert_kept(strategies_stand_alone)


def test_core_needs_nothing_but_torch():
    assert_kept(core_needs_torch_alone)


def test_algorithms_know_no_clock_thread_or_socket():
    assert_kept(determinism)


def test_algorithms_draw_from_named_streams_only():
    assert_kept(no_global_random_state)


def test_no_byte_is_ever_run_as_code():
    assert_kept(nothing_runs_code_from_bytes)


def test_nothing_is_called_utils():
    assert_kept(things_live_with_their_noun)


def test_every_file_fits_its_page():
    assert_kept(files_fit_their_page)


def test_no_part_of_the_engine_names_node():
    assert_kept(engine_knows_no_node)


def test_every_part_of_the_engine_is_built_by_its_own_tests():
    assert_kept(parts_have_tests)


def test_strategies_use_the_verbs_of_their_node():
    assert_kept(strategies_use_verbs)


def test_no_file_imports_itself_by_way_of_others():
    assert not list(circles(house()))


def circles(sources: list[Source]) -> Iterator[str]:
    """Import circles, imports inside functions and under TYPE_CHECKING counted."""
    modules = {module_of(source): source for source in sources}
    arrows = {name: set(imported_modules(source, modules)) - {name} for name, source in modules.items()}
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    if arrows:  # what is left imports something that is left: follow it until it comes round
        trail = [next(iter(sorted(arrows)))]
        while trail[-1] not in trail[:-1]:
            trail.append(min(arrows[trail[-1]] & arrows.keys()))
        yield " -> ".join(trail[trail.index(trail[-1]) :])


def module_of(source: Source) -> str:
    parts = ["shoal", *source.path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: Source, modules: dict[str, Source]) -> Iterator[str]:
    """The files that an import runs: the module itself, or the package that a name comes from."""
    for _, target in source.imported:
        if target in modules:
            yield target
        elif target.rpartition(".")[0] in modules:
            yield target.rpartition(".")[0]


def test_a_circle_is_found_also_inside_a_function():
    a = Source(PurePosixPath("core/a.py"), "from shoal.core.b import x")
    b = Source(PurePosixPath("core/b.py"), "def f():\n    from shoal.core import c")
    c = Source(PurePosixPath("core/c.py"), "if TYPE_CHECKING:\n    from shoal.core.a import y")
    assert list(circles([a, b, c])) == ["shoal.core.a -> shoal.core.b -> shoal.core.c -> shoal.core.a"]
    assert not list(circles([a, b]))


def test_no_two_public_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for source in house():
        if not source.path.name.endswith("_pb2.py"):
            for node in source.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(source.path))
    assert not {name: where for name, where in homes.items() if len(where) > 1}


SIBLINGS = {  # the same thing in several folders, or a command and what it calls
    *(
        "codec.py",
        "cpu.py",
        "gpu.py",
        "transport.py",
        "windows.py",
        "all_reduce.py",
        "run.py",
        "split.py",
        "__init__.py",
    ),
}


def test_no_two_files_have_one_name_for_different_things():
    names = sorted(source.path.name for source in house() if source.path.name not in SIBLINGS)
    assert not [name for name, after in pairwise(names) if name == after]


def test_no_two_test_files_have_one_name():
    names = sorted(
        path.name for path in Path(__file__).parent.rglob("test_*.py")
    )  # pytest imports them by name
    assert not [name for name, after in pairwise(names) if name == after]


@pytest.mark.parametrize("folder", ["benchmarks", "tests/support"])
def test_no_script_hides_a_module_of_python(folder: str):
    names = {
        path.stem for path in (HOUSE.parents[1] / folder).glob("*.py")
    }  # Python and mypy look there first
    assert names and not names & sys.stdlib_module_names


def test_the_page_on_extending_lists_exactly_the_verbs_of_a_node():
    from shoal.vocabulary.node import Node

    verbs = {name for kind in Node.__mro__[:-1] for name in vars(kind) if not name.startswith("_")} | {"rank"}
    page = (HOUSE.parent.parent / "docs" / "extending.md").read_text()
    tables = re.findall(r"^\| `(?:await |async for \w+ in |\w+ = await )?[ws]\.(\w+)", page, flags=re.M)
    assert sorted(tables) == sorted(verbs)


def test_every_function_is_short():
    assert_kept(functions_are_short)


def test_public_names_are_few_sorted_and_explained():
    door = HOUSE / "__init__.py"
    if not door.exists() or not door.read_text().strip():
        pytest.skip("the front door is not built yet")
    import shoal

    assert not list(export_faults(shoal))


def lines(n: int, indent: str = "") -> str:
    return f"{indent}x = 1\n" * n


CONTROLS: list[tuple[Rule, str, str]] = [
    (layering, "core/a.py", "import shoal.sim"),
    (layering, "core/a.py", "from shoal import strategies"),
    (layering, "core/a.py", "def f():\n    from ..sim import kernel"),
    (layering, "core/a.py", "from importlib import import_module\nimport_module('shoal.strategies.easgd')"),
    (layering, "strategies/a.py", "from shoal.transports import processes"),
    (layering, "codecs/a.py", "from shoal.collectives import tree"),
    (layering, "transports/a.py", "from shoal.codecs import fp16"),
    (layering, "sim/a.py", "import shoal.strategies.easgd as e"),
    (layering, "report/a.py", "from shoal.api.run import run"),
    (layering, "replicas/module.py", "from shoal.launch import local"),
    (layering, "api/run.py", "from shoal.cli import main"),
    (layering, "api/run.py", "import shoal"),
    (
        layering,
        "launch/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shoal.testing",
    ),
    (layering, "testing/a.py", "import shoal.cli"),
    (layering, "__init__.py", "from shoal.testing import Slope"),
    (layering, "attic/a.py", ""),
    (strategies_stand_alone, "strategies/a.py", "from shoal.strategies.easgd import EASGD"),
    (strategies_stand_alone, "strategies/a.py", "from .easgd import EASGD"),
    (core_needs_torch_alone, "core/a.py", "import numpy as np"),
    (determinism, "core/a.py", "import asyncio"),
    (determinism, "strategies/a.py", "from time import monotonic"),
    (determinism, "codecs/a.py", "import torch.distributed as dist"),
    (determinism, "codecs/a.py", "from torch import distributed"),
    (determinism, "core/a.py", "import torch\ntorch.distributed.barrier()"),
    (determinism, "core/a.py", "import torch as t\nt.distributed.barrier()"),
    (determinism, "core/a.py", "def f():\n    import random"),
    (no_global_random_state, "core/a.py", "import torch\ntorch.manual_seed(0)"),
    (no_global_random_state, "core/a.py", "from torch import manual_seed as seed\nseed(0)"),
    (no_global_random_state, "codecs/a.py", "import torch\ntorch.randn(3)"),
    (no_global_random_state, "codecs/a.py", "from torch import randperm\nrandperm(3)"),
    (no_global_random_state, "codecs/a.py", "import torch\ntorch.rand_like(v)"),
    (no_global_random_state, "strategies/a.py", "x.clone().normal_()"),
    (determinism, "strategies/a.py", "import numpy as np\nnp.random.rand(3)"),
    (nothing_runs_code_from_bytes, "transports/a.py", "import pickle"),
    (nothing_runs_code_from_bytes, "launch/a.py", "from cloudpickle import dumps"),
    (nothing_runs_code_from_bytes, "checkpoint.py", "import torch\ntorch.load('x', weights_only=True)"),
    (nothing_runs_code_from_bytes, "checkpoint.py", "from torch import load"),
    (nothing_runs_code_from_bytes, "cli.py", "eval('1')"),
    (nothing_runs_code_from_bytes, "cli.py", "exec('1')"),
    (nothing_runs_code_from_bytes, "transports/a.py", "dist.broadcast_object_list(x)"),
    (
        nothing_runs_code_from_bytes,
        "transports/a.py",
        "from torch.distributed import all_gather_object as g\ng(x)",
    ),
    (things_live_with_their_noun, "core/utils.py", ""),
    (things_live_with_their_noun, "launch/_helpers.py", ""),
    (things_live_with_their_noun, "common/a.py", ""),
    (things_live_with_their_noun, "sim/event_manager.py", ""),
    (things_live_with_their_noun, "core/a.py", "from shoal.core.misc import f"),
    (things_live_with_their_noun, "core/a.py", "from . import utils"),
    (engine_knows_no_node, "engine/a.py", "def f(node: Node) -> None: ..."),
    (engine_knows_no_node, "engine/a.py", "from shoal.vocabulary.node import Node"),
    (engine_knows_no_node, "engine/a.py", "def f(node: 'Node | None') -> None: ..."),
    (parts_have_tests, "engine/untested.py", "class Untested:\n    def __init__(self): ..."),
    (parts_have_tests, "engine/node.py", "class Mailbox:\n    def __init__(self): ..."),
    (strategies_use_verbs, "strategies/a.py", "w.engine.meter"),
    (strategies_use_verbs, "strategies/a.py", "self._w.coding.encode(v)"),
    (strategies_use_verbs, "strategies/a.py", "from shoal.core.replica import NoMoreSteps"),
    (files_fit_their_page, "codecs/a.py", lines(401)),
    (files_fit_their_page, "launch/a.py", lines(401)),
    (files_fit_their_page, "vocabulary/node.py", lines(401)),
    (functions_are_short, "core/a.py", "def f():\n" + lines(41, "    ")),
    (functions_are_short, "core/a.py", "class A:\n    async def f(self):\n" + lines(41, "        ")),
]

HARMLESS: list[tuple[Rule, str, str]] = [
    (layering, "sim/a.py", "from shoal.collectives import tree\nfrom shoal.sim.kernel import Kernel"),
    (layering, "cli.py", "import shoal\nfrom shoal.report import table\nfrom shoal import launch"),
    (strategies_stand_alone, "strategies/__init__.py", "from shoal.strategies.easgd import EASGD"),
    (
        core_needs_torch_alone,
        "core/a.py",
        "import math\nfrom torch import Tensor\nfrom shoal.core import errors",
    ),
    (determinism, "core/a.py", "time = 3\nprint(time)\nself.random.x"),
    (determinism, "transports/a.py", "import asyncio"),
    (no_global_random_state, "core/a.py", "import torch\ntorch.randn(3, generator=g)\ntorch.Generator()"),
    (no_global_random_state, "core/a.py", "import torch\nx.bernoulli_(0.5, generator=g)\ntorch.zeros(3)"),
    (no_global_random_state, "replicas/module.py", "import torch\ntorch.manual_seed(0)"),
    (nothing_runs_code_from_bytes, "api/run.py", "import re\nmodel.eval()\nre.compile('x')\nstate.load(x)"),
    (
        things_live_with_their_noun,
        "api/attach.py",
        "from torch.utils.data import DataLoader\nimport torch.nn.utils",
    ),
    (files_fit_their_page, "codecs/a.py", lines(400)),
    (engine_knows_no_node, "engine/a.py", '"""What Node has verbs for."""\nnode = Engine()'),
    (parts_have_tests, "engine/ledger.py", "class Ledger:\n    def __init__(self): ..."),
    (parts_have_tests, "engine/untested.py", "class Untested(Message):\n    tag: str = 'word'"),
    (strategies_use_verbs, "strategies/a.py", "w.x.copy_(v)\nself._w.x.add_(v)\nm.body.item()"),
    (
        functions_are_short,
        "core/a.py",
        'def f():\n    """One.\n' + "\n" * 30 + '    """\n' + lines(40, "    "),
    ),
    (functions_are_short, "core/a.py", 'def f():\n    """Nothing but this."""'),
]


@pytest.mark.parametrize(("rule", "path", "text"), CONTROLS)
def test_a_broken_rule_is_caught(rule: Rule, path: str, text: str):
    assert list(rule(Source(PurePosixPath(path), text)))


@pytest.mark.parametrize(("rule", "path", "text"), HARMLESS)
def test_what_only_looks_broken_is_let_through(rule: Rule, path: str, text: str):
    assert not list(rule(Source(PurePosixPath(path), text)))


def test_bad_exports_are_caught():
    def silent() -> None: ...

    @dataclass
    class Bare:
        x: int = 0

    door = types.ModuleType("door")
    door.__dict__.update(silent=silent, Bare=Bare, LIMIT=3, __all__=["silent", "gone", "LIMIT", "Bare"])
    told = "\n".join(export_faults(door))
    assert "not sorted" in told
    assert "gone does not exist" in told
    assert "silent has no docstring" in told
    assert "Bare has no docstring" in told
    assert "LIMIT has" not in told


def test_a_door_that_exports_nothing_is_caught():
    assert list(export_faults(types.ModuleType("door"))) == ["__all__ is missing or empty"]


def test_too_many_exports_are_caught():
    door = types.ModuleType("door")
    names = [f"name{i:02}" for i in range(MOST_EXPORTS + 1)]
    door.__dict__.update(dict.fromkeys(names, 1), __all__=names)
    assert "41 public names" in next(export_faults(door))


# -------------------------------------------------------- the check in conftest.py that nothing stays behind


def test_a_running_thread_is_seen_and_a_finished_one_is_not(snapshot):
    before, stop = snapshot(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="lingerer", daemon=True)
    thread.start()
    assert before.left_behind(grace_seconds=0) == ["thread 'lingerer'"]
    stop.set()
    assert before.left_behind() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_open_file_is_seen_and_a_closed_one_is_not(snapshot, tmp_path):
    before = snapshot()
    with (tmp_path / "open").open("w"):
        (told,) = before.left_behind(grace_seconds=0)
        assert told.endswith("/open")
    assert before.left_behind(grace_seconds=0) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_is_seen_until_somebody_has_waited_for_it(snapshot):
    before = snapshot()
    child = subprocess.Popen(["sleep", "60"])
    while not Path(f"/proc/{child.pid}/cmdline").read_bytes():  # for a moment it has none yet
        time.sleep(0.001)
    assert f"child {child.pid}: sleep 60" in before.left_behind(grace_seconds=0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still not reaped
    assert f"child {child.pid}: (ended, but nobody waited for it)" in before.left_behind(grace_seconds=0)
    child.wait()
    assert before.left_behind(grace_seconds=0) == []


def test_changed_environment_and_torch_threads_are_seen(snapshot, monkeypatch):
    before, threads = snapshot(), torch.get_num_threads()
    monkeypatch.setenv("SHOAL_HOUSE_TEST", "1")
    torch.set_num_threads(threads + 1)
    try:
        told = before.left_behind(grace_seconds=0)
    finally:
        torch.set_num_threads(threads)
    assert told == [
        "changed environment variable SHOAL_HOUSE_TEST",
        f"torch.get_num_threads() is {threads + 1}, was {threads}",
    ]
