"""A table of text on a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> str:
    """Rows below their headers, in a frame that scrolls sideways; the first cell of a row is its name.

    With a `title` the table has a heading, and the keyboard reaches the frame.
    """
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    grid = f'<table class="summary"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    if title is None:
        return f'<div class="scroll">{grid}</div>'
    label = escape(title, quote=True)
    return f'<h2>{label}</h2><div class="scroll" role="region" aria-label="{label}" tabindex="0">{grid}</div>'
