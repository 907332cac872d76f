"""Space: the hyper-parameters of a search and their ranges, from a dict, a file, or options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from shoal.core.errors import Unavailable
from shoal.search.architectures import ARCHITECTURES, Architectures
from shoal.search.ranges import Placed, Range, read_range

ARCHITECTURE = "architecture"

Values: TypeAlias = dict[str, Any]
"""A value for each hyper-parameter, as JSON has it."""

SpaceLike: TypeAlias = "Space | Mapping[str, Any]"
"""A space, or a dict of what `read_range` takes."""


class Space(Mapping[str, Range]):
    """The ranges of a search by the name of the hyper-parameter, in the order given.

    Raises ValueError for a value that is no range.
    """

    def __init__(self, ranges: Mapping[str, Any]) -> None:
        if not ranges:
            raise ValueError('a search space needs at least one hyper-parameter, as lr = "log 1e-4..1"')
        self._ranges = {name: _read(name, given) for name, given in ranges.items()}

    def __getitem__(self, name: str) -> Range:
        return self._ranges[name]

    def __iter__(self) -> Any:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def placed(self) -> dict[str, Placed]:
        """The ranges whose values have places from 0 to 1: all but architectures."""
        return {name: found for name, found in self.items() if isinstance(found, Placed)}

    @property
    def architecture(self) -> Architectures | None:
        """The space of architectures, if there is one."""
        found = self.get(ARCHITECTURE)
        return found if isinstance(found, Architectures) else None

    def sample(self, rng: Random) -> Values:
        """A value for each, from the priors."""
        return {name: found.sample(rng) for name, found in self.items()}

    def mutate(self, values: Values, rng: Random) -> Values:
        """The same values but for one mutation of one hyper-parameter."""
        name = rng.choice(list(self))
        return {**values, name: self[name].mutate(values[name], rng)}

    def explore(
        self, values: Values, rng: Random, fixed: Iterable[str], factor: float, resample: float
    ) -> Values:
        """Each one drawn anew with probability `resample`, else perturbed; those in `fixed` stay."""
        kept = {ARCHITECTURE, *fixed}
        return {
            name: value
            if name in kept
            else self[name].sample(rng)
            if rng.random() < resample
            else self[name].explore(value, rng, factor)
            for name, value in values.items()
        }

    def text(self) -> dict[str, str]:
        """Each range as a space file spells it."""
        return {name: found.text() for name, found in self.items()}


def read_space(given: SpaceLike) -> Space:
    """A Space from a dict; a Space is returned as it is."""
    return given if isinstance(given, Space) else Space(given)


def read_space_file(path: Path) -> Space:
    """The space in a TOML or JSON file. Raises ValueError with the line of what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--space: cannot read {path}: {getattr(error, 'strerror', error)}") from None
    table = _read_json(text, path) if path.suffix == ".json" else _read_toml(text, path)
    if not isinstance(table, dict):
        raise ValueError(f'{path}: a search space is a table of names and ranges, as lr = "log 1e-4..1"')
    table = _flatten(table)
    for name, given in table.items():
        try:
            _read(name, given)
        except ValueError as error:
            raise ValueError(f"{path}, line {_line_of(name, text)}: {error}") from None
    return Space(table)


def read_space_options(options: Iterable[str]) -> dict[str, Any]:
    """The ranges of options such as --vary "lr=log 1e-4..1"."""
    found: dict[str, Any] = {}
    for option in options:
        name, given, text = option.partition("=")
        if not given or not name.strip():
            raise ValueError(f'--vary {option!r} should be NAME=RANGE, as in --vary "lr=log 1e-4..1"')
        found[name.strip()] = text.strip()
        _read(name.strip(), text.strip())
    return found


def _read(name: str, given: Any) -> Range:
    try:
        if name == ARCHITECTURE and isinstance(given, str):
            return ARCHITECTURES.read(given)
        found = read_range(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if (name == ARCHITECTURE) != isinstance(found, Architectures):
        raise ValueError(f'{name}: an architecture is searched under the name {ARCHITECTURE!r}, as "layers"')
    return found


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """`strategy.period = …` is a table in a table to TOML, and one name to us."""
    flat: dict[str, Any] = {}
    for name, given in table.items():
        inner = given.items() if isinstance(given, dict) else ()
        flat |= {f"{name}.{key}": value for key, value in inner} or {name: given}
    return flat


def _read_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _read_toml(text: str, path: Path) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        raise Unavailable(f"reading {path} needs Python 3.11; write the space as a .json file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _line_of(name: str, text: str) -> int:
    """The line on which a name is set."""
    named = re.compile(rf'^\s*["\']?{re.escape(name)}["\']?\s*[=:]')
    return next((n for n, line in enumerate(text.splitlines(), 1) if named.match(line)), 1)
