"""Declarations: docstring and options of a class or function, read from its source file without importing it.

`shoal --help`, `shoal list` and the checks of arguments need no more than this, and so do not import torch.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

PACKAGE = Path(__file__).parent.parent
KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
NO_DEFAULT = inspect.Parameter.empty


class Option(NamedTuple):
    """One option: its name, the types its value may have (`object` for any but KINDS), and its default."""

    name: str
    kinds: tuple[type, ...]
    default: Any


class OwnOption(NamedTuple):
    """An argument `self.NAME` of a check."""

    name: str


class Check(NamedTuple):
    """A call in `__post_init__` whose arguments are literals or options: at_least(1, period=self.period)."""

    module: str
    function: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


class Declaration(NamedTuple):
    """What a class or function says of itself. `module` is the one that defines it."""

    module: str
    doc: str
    module_doc: str
    options: Mapping[str, Option]
    returned: Mapping[str, Any]  # the literals of `return Task(batch=64)`; none for a class


def declared(thing: Callable[..., Any]) -> Declaration:
    """The declaration of a class or function that is already imported."""
    hints = get_type_hints(thing)
    options = {
        name: Option(name, _kinds_of(hints.get(name, str)), parameter.default)
        for name, parameter in inspect.signature(thing).parameters.items()
    }
    module = inspect.getmodule(thing)
    name, about = getattr(module, "__name__", ""), inspect.getdoc(module) or ""
    return Declaration(name, inspect.getdoc(thing) or "", about, options, {})


@cache
def read_declaration(target: str) -> Declaration:
    """The declaration of "module:Name", a class or function of this package, from its source file."""
    module, _, name = target.partition(":")
    source, node = _find(module, name) or (None, None)
    if source is None or not isinstance(node, ast.ClassDef | ast.FunctionDef):
        raise ValueError(f"{target} is neither a class nor a function of this package")
    doc, module_doc = ast.get_docstring(node) or "", ast.get_docstring(source.tree) or ""
    if isinstance(node, ast.FunctionDef):
        options = {option.name: option for option in _parameters(source, node)}
        return Declaration(source.module, doc, module_doc, options, _returned(source, node))
    return Declaration(source.module, doc, module_doc, _fields(source, node), {})


@cache
def read_checks(target: str) -> tuple[Check, ...]:
    """The checks that `__post_init__` of "module:Name" makes of its options; none for a function."""
    module, _, name = target.partition(":")
    source, node = _find(module, name) or (None, None)
    if source is None or not isinstance(node, ast.ClassDef):
        return ()
    return tuple(_checks(source, node, "__post_init__", _fields(source, node)))


# -- source files and names ---------------------------------------------------------------------------


class _Source(NamedTuple):
    module: str
    tree: ast.Module
    defined: Mapping[str, ast.stmt]
    imported: Mapping[str, tuple[str, str]]  # name -> the module and name it stands for there


@cache
def _source(module: str) -> _Source | None:
    """A module of this package; None for any other."""
    package, *parts = module.split(".")
    path = PACKAGE.joinpath(*parts)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if package != PACKAGE.name or not file.is_file():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            defined[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            defined[statement.targets[0].id] = statement
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            imported |= {a.asname or a.name: (statement.module, a.name) for a in statement.names}
    return _Source(module, tree, defined, imported)


def _find(module: str, name: str) -> tuple[_Source, ast.stmt] | None:
    """The statement that defines a name, in the module it comes from; None if that is not of this package."""
    source = _source(module)
    if source is None:
        return None
    if name in source.defined:
        return source, source.defined[name]
    return _find(*source.imported[name]) if name in source.imported else None


def _bases(source: _Source, node: ast.ClassDef) -> Iterator[tuple[_Source, ast.ClassDef]]:
    for base in node.bases:
        found = _find(source.module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def _literal(source: _Source, node: ast.expr) -> Any:
    """The value of a literal, or of a constant with a literal value; raises ValueError for anything else."""
    if isinstance(node, ast.Name):
        found = _find(source.module, node.id)
        if found is None or not isinstance(found[1], ast.Assign):
            raise ValueError(f"{source.module}, line {node.lineno}: {node.id} is not a constant")
        return _literal(found[0], found[1].value)
    return ast.literal_eval(node)


# -- options ------------------------------------------------------------------------------------------


def _fields(source: _Source, node: ast.ClassDef) -> dict[str, Option]:
    """The options of a dataclass, those it inherits first."""
    options: dict[str, Option] = {}
    for base in reversed([*_bases(source, node)]):
        options |= _fields(*base)
    if not any(_name(decorator) == "dataclass" for decorator in node.decorator_list):
        return options
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            option = _field(source, statement.target.id, statement)
            if option is not None:
                options[option.name] = option
    return options


def _field(source: _Source, name: str, statement: ast.AnnAssign) -> Option | None:
    """The option of an annotated field; None for a class variable or a field that is not an argument."""
    annotation, value = statement.annotation, statement.value
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "ClassVar":
        return None
    if isinstance(value, ast.Call) and _name(value) == "field":
        given = {word.arg: word.value for word in value.keywords}
        if "init" in given and not _literal(source, given["init"]):
            return None
        value = given.get("default")
    return Option(name, _kinds(annotation), NO_DEFAULT if value is None else _literal(source, value))


def _parameters(source: _Source, node: ast.FunctionDef) -> Iterator[Option]:
    """The parameters of a function."""
    positional = [*node.args.posonlyargs, *node.args.args]
    without = len(positional) - len(node.args.defaults)
    defaults: list[ast.expr | None] = [*([None] * without), *node.args.defaults, *node.args.kw_defaults]
    for parameter, value in zip([*positional, *node.args.kwonlyargs], defaults, strict=True):
        default = NO_DEFAULT if value is None else _literal(source, value)
        yield Option(parameter.arg, _kinds(parameter.annotation), default)


def _kinds(annotation: ast.expr | None) -> tuple[type, ...]:
    if annotation is None:
        return (str,)
    if isinstance(annotation, ast.BinOp):
        return (*_kinds(annotation.left), *_kinds(annotation.right))
    return (KINDS.get(ast.unparse(annotation), object),)


def _kinds_of(hint: Any) -> tuple[type, ...]:
    """The same of a type hint."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(kind if kind in KINDS.values() else object for kind in kinds)


def _name(node: ast.expr) -> str:
    """The last name of `dataclass`, `dataclass(frozen=True)` or `dataclasses.dataclass`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# -- what bodies say ----------------------------------------------------------------------------------


def _returned(source: _Source, node: ast.FunctionDef) -> dict[str, Any]:
    """The literal keyword arguments of the call that a function returns."""
    found: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call):
            for word in statement.value.keywords:
                if word.arg is not None and isinstance(word.value, ast.Constant):
                    found[word.arg] = _literal(source, word.value)
    return found


def _checks(
    source: _Source, node: ast.ClassDef, method: str, options: Mapping[str, Option]
) -> Iterator[Check]:
    """The checks that a method makes, and the methods of its own that it calls."""
    body = next((f.body for f in node.body if isinstance(f, ast.FunctionDef) and f.name == method), None)
    if body is None:
        for base in _bases(source, node):
            yield from _checks(*base, method, options)
        return
    for statement in body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
            continue
        call = statement.value
        if isinstance(call.func, ast.Name):
            yield from _check(source, call.func.id, call, options)
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            yield from _checks(source, node, call.func.attr, options)  # self.check_blocks()
        elif isinstance(call.func, ast.Attribute) and _name(call.func.value) == "super":
            for base in _bases(source, node):
                yield from _checks(*base, call.func.attr, options)


def _check(source: _Source, name: str, call: ast.Call, options: Mapping[str, Option]) -> Iterator[Check]:
    found = _find(source.module, name)
    if found is None:
        return

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute) and _name(node.value) == "self" and node.attr in options:
            return OwnOption(node.attr)
        return _literal(source, node)

    try:
        args = tuple(value(node) for node in call.args)
        keywords = {word.arg or "": value(word.value) for word in call.keywords}
    except ValueError:  # an argument that only the method itself can work out
        return
    yield Check(found[0].module, name, args, keywords)
