"""Catalogue: the class or function behind a word of the command line, its options, and the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Generic, TypeVar

from shoal.core.declarations import Declaration, Option, OwnOption, declared, read_checks, read_declaration

T = TypeVar("T")


class Catalogue(Mapping[str, Callable[..., T]], Generic[T]):
    """Named factories of one kind: dataclasses, or functions with annotated options.

    An entry is the factory itself or "module:Name" in this package, which is imported when it is first looked
    up. `check` reads such an entry from its source file instead, so wrong options cost no import of torch.
    It also makes the checks of `__post_init__` that call a function of one of the modules in `checks`, which
    must not import torch.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, str | Callable[..., T]], checks: Collection[str] = ()
    ) -> None:
        self.kind = kind
        self._entries = dict(entries)
        self._checks = frozenset(checks)

    def __getitem__(self, word: str) -> Callable[..., T]:
        entry = self._entry(word)
        if not isinstance(entry, str):
            return entry
        module, _, name = entry.partition(":")
        factory: Callable[..., T] = getattr(import_module(module), name)
        return factory

    def __contains__(self, word: object) -> bool:
        return word in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def declaration(self, word: str) -> Declaration:
        """Docstring and options of the entry of this name; imports nothing."""
        entry = self._entry(word)
        return read_declaration(entry) if isinstance(entry, str) else declared(entry)

    def options(self, word: str) -> Mapping[str, Option]:
        """The options that the entry of this name takes."""
        return self.declaration(word).options

    def check(self, word: str, **options: Any) -> dict[str, Any]:
        """The options with text read as the option's own type; raises ValueError for a wrong one.

        Does not import the entry: what only its own `__post_init__` can find, `make` finds.
        """
        known = self.options(word)
        for name in options:
            if name not in known:
                raise ValueError(f"{self.kind} {word!r} has no option {name!r}. {nearest(name, known)}")
        values = {
            name: _read(value, known[name], f"{self.kind} {word!r}") if isinstance(value, str) else value
            for name, value in options.items()
        }
        self._check_values(word, {name: option.default for name, option in known.items()} | values)
        return values

    def make(self, word: str, **options: Any) -> T:
        """The thing called `word`; option values given as text are read as the option's own type."""
        factory, values = self[word], self.check(word, **options) if options else {}
        with self._named(word):
            return factory(**values)

    def check_text(self, text: str) -> None:
        """Raise ValueError for what `read` would refuse, as far as that can be told without an import."""
        word, options = split_options(text)
        self.check(word, **options)

    def read(self, text: str, **others: Any) -> T:
        """What a word stands for, with its options if it has any: 'torus:rows=2'; `others` are more."""
        word, options = split_options(text)
        for name in options:
            if name in others:
                raise ValueError(f"{self.kind} {text!r} has {name!r} already; say {name}= once")
        return self.make(word, **options, **others)

    def text_of(self, thing: object) -> str:
        """What `read` makes such a thing from: its word, and the options that differ from their defaults."""
        word = self.name_of(thing)
        if word not in self or not dataclasses.is_dataclass(thing):
            return word
        defaults = {option.name: option.default for option in self.options(word).values()}
        told = {name: getattr(thing, name) for name in defaults if getattr(thing, name) != defaults[name]}
        options = ",".join(f"{name}={value}" for name, value in told.items())
        return f"{word}:{options}" if options else word

    def name_of(self, thing: object) -> str:
        """The word for an object made here, or its class name for one that was not."""
        name = type(thing).__name__
        for word, entry in self._entries.items():
            may_be = entry.endswith(f":{name}") if isinstance(entry, str) else entry is type(thing)
            if may_be and self[word] is type(thing):
                return word
        return name

    def class_called(self, name: str) -> Callable[..., T]:
        """The entry whose class or function has that name; raises AttributeError if there is none."""
        for word, entry in self._entries.items():
            if isinstance(entry, str) and entry.endswith(f":{name}"):
                return self[word]
        raise AttributeError(f"there is no {self.kind} class {name!r}")

    def _entry(self, word: str) -> str | Callable[..., T]:
        check_word(self.kind, word, self._entries)
        return self._entries[word]

    def _check_values(self, word: str, values: Mapping[str, Any]) -> None:
        """Make the checks of `__post_init__` that need no torch."""

        def value(argument: Any) -> Any:
            return values[argument.name] if isinstance(argument, OwnOption) else argument

        entry = self._entry(word)
        for check in read_checks(entry) if isinstance(entry, str) else ():
            if check.module in self._checks:
                function = getattr(import_module(check.module), check.function)
                keywords = {name: value(own) for name, own in check.keywords.items()}
                with self._named(word):
                    function(*map(value, check.args), **keywords)

    @contextmanager
    def _named(self, word: str) -> Iterator[None]:
        """Begin the message about a wrong option with the entry it belongs to."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.kind} {word!r}: {error}") from error


def check_word(kind: str, word: str, known: Iterable[str]) -> None:
    """Raise ValueError with the nearest name unless the word is known."""
    if word not in known:
        raise ValueError(f"unknown {kind} {word!r}. {nearest(word, known)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that suggests the nearest known name, or lists them all."""
    names = list(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    listing = f"Known: {', '.join(names) or 'none'}."
    return f"Did you mean {close[0]!r}? {listing}" if close else listing


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """A word and its options, as text: 'torus:rows=2' is ('torus', {'rows': '2'})."""
    word, _, rest = text.partition(":")
    return word, dict(part.partition("=")[::2] for part in rest.split(",") if part)


def split_list(text: str) -> list[str]:
    """The words of a list, each with its options: 'sync,local:period=8,average=full' has two."""
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if (
            "=" in part and ":" not in part and found and ":" in found[-1]
        ):  # another option of the word before
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return found


def _read(text: str, option: Option, owner: str) -> Any:
    kinds = option.kinds
    if text.lower() in ("none", "auto") and type(None) in kinds:
        return None
    if bool in kinds:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError(f"{owner}: {option.name}={text!r} should be true or false")
        return text.lower() in ("true", "yes", "1")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if int in kinds or float in kinds:
        wanted = "number" if float in kinds else "whole number"
        raise ValueError(f"{owner}: {option.name}={text!r} should be a {wanted}")
    return text
