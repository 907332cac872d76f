"""Catalogue: what a word on the command line stands for, with its options and the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of an entry, as `shoal list` prints it."""

    name: str
    type: Any
    default: Any


class Catalogue(Mapping[str, Callable[..., T]], Generic[T]):
    """Named factories of one kind; an entry is a dataclass or a function with annotated options."""

    def __init__(self, kind: str, entries: Mapping[str, Callable[..., T]]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, word: str) -> Callable[..., T]:
        if word not in self._entries:
            raise ValueError(f"unknown {self.kind} {word!r}. {nearest(word, self._entries)}")
        return self._entries[word]

    def __contains__(self, word: object) -> bool:
        return word in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def options(self, word: str) -> dict[str, Option]:
        """The options that the entry of this name takes."""
        factory = self[word]
        hints = get_type_hints(factory)
        return {
            name: Option(name, hints.get(name, str), parameter.default)
            for name, parameter in inspect.signature(factory).parameters.items()
        }

    def make(self, word: str, **options: Any) -> T:
        """The thing called `word`; option values given as text are read as the option's own type."""
        known = self.options(word)
        for name in options:
            if name not in known:
                raise ValueError(f"{self.kind} {word!r} has no option {name!r}. {nearest(name, known)}")
        values = {
            name: _read(value, known[name], f"{self.kind} {word!r}") if isinstance(value, str) else value
            for name, value in options.items()
        }
        return self[word](**values)

    def read(self, text: str) -> T:
        """What a word stands for, with its options if it has any: 'torus:rows=2'."""
        word, _, rest = text.partition(":")
        return self.make(word, **dict(part.partition("=")[::2] for part in rest.split(",") if part))

    def text_of(self, thing: object) -> str:
        """What `read` makes such a thing from: its word, and the options that are not as they would be."""
        word = self.name_of(thing)
        if word not in self or not dataclasses.is_dataclass(thing):
            return word
        defaults = {option.name: option.default for option in self.options(word).values()}
        told = {name: getattr(thing, name) for name in defaults if getattr(thing, name) != defaults[name]}
        options = ",".join(f"{name}={value}" for name, value in told.items())
        return f"{word}:{options}" if options else word

    def name_of(self, thing: object) -> str:
        """The word for an object made here, or its class name for one that was not."""
        for word, factory in self._entries.items():
            if factory is type(thing):
                return word
        return type(thing).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that suggests the nearest known name, or lists them all."""
    names = list(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    listing = f"Known: {', '.join(names) or 'none'}."
    return f"Did you mean {close[0]!r}? {listing}" if close else listing


def _read(text: str, option: Option, owner: str) -> Any:
    kinds = get_args(option.type) if get_origin(option.type) in (Union, types.UnionType) else (option.type,)
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
