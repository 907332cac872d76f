"""Plain values as YAML text, for manifests: dictionaries, lists, words, numbers and truth values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][\w./-]*")
RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def to_yaml(value: Any) -> str:
    """The value in block style. Strings that YAML could read as something else are quoted."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if _is_nested(inner):
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{_scalar(key)}: {_scalar(inner)}"
    elif isinstance(value, list) and value:
        for inner in value:
            first, *rest = _lines(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)  # which is YAML, too
