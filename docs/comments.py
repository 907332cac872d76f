"""An extension of Griffe: the comment behind a field of a class is its documentation."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """`period: int = 16  # tau: steps between two averages` gives `period` the text behind the sign."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        is_field = attr.parent is not None and attr.parent.is_class
        if is_field and attr.docstring is None and (comment := trailing_comment(attr.source)):
            attr.docstring = griffe.Docstring(comment, parent=attr)


def trailing_comment(source: str) -> str:
    """The comment on the last line of a statement; none where the source is no statement of its own."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source.strip()).readline))
    except (tokenize.TokenError, IndentationError):
        return ""
    comments = [token.string.removeprefix("#").strip() for token in tokens if token.type == tokenize.COMMENT]
    text = comments[-1] if comments else ""
    return "" if text.startswith(("type:", "noqa")) else text
