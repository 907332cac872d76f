"""The pages of the documentation as a program reads them: fenced blocks with their markers, links, anchors.

A marker is a comment on the line before a block: `<!-- docs: WORDS: REASON -->`. See CONTRIBUTING.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]

SHELL = {"bash", "console"}
OUTPUT = {"text", "diff", "json", "toml", "yaml"}
"""Shown, never run; a test of the page's own room may still check it."""

FLAGS = {"checked", "continues", "prints", "shown", "soak"}
WITH_NAME = {"after", "exits", "file", "needs"}
NEED_REASON = {"checked", "shown"}
"""A block under one of these does not run, so the page says why."""

BLOCKS_ALONE = MarkdownIt("commonmark").enable("table").disable("inline")
"""Half the time of a whole page, which every process that collects the tests pays."""

MARKER = re.compile(r"<!-- docs: (?P<words>[^:]*?)(?:: (?P<reason>.*?))? -->", re.S)
INLINE_HTML = re.compile(r"<a\s[^>]*\b(?:id|name)=\"([^\"]+)\"")
NOT_IN_ANCHOR = re.compile(r"[^\w\- ]")


@dataclass(frozen=True)
class Block:
    """One fenced block: `words` are those of its marker, `names` what some of them are followed by."""

    page: Path
    line: int
    language: str
    text: str
    words: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, each on one line; in a console they follow a dollar sign."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [line.strip() for line in joined.splitlines()]
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def output(self) -> str:
        """What a console shows below its commands."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return "".join(line for line in joined.splitlines(keepends=True) if not line.startswith("$ "))

    @property
    def faults(self) -> Iterator[str]:
        """What is wrong with its language or marker."""
        if self.language not in SHELL | OUTPUT | {"python"}:
            yield f"{self}: name the block's language: python, bash, console or text"
        for word in self.words - FLAGS:
            if word not in WITH_NAME:
                yield f"{self}: unknown word {word!r} in the marker"
            elif not self.names.get(word):
                yield f"{self}: the marker's word {word!r} needs a name"
        if NEED_REASON & self.words and not self.reason:
            yield f"{self}: say in the marker why the block does not run, after a colon"
        if self.words - {"file"} and self.language in OUTPUT:
            yield f"{self}: this block does not run in any case, so it needs no marker but 'file'"


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        found, before = [], ""
        for token in BLOCKS_ALONE.parse(self.text):
            if token.type == "fence":
                found.append(self._block(token, before))
            before = token.content if token.type == "html_block" else ""
        return found

    def _block(self, token: Token, comment: str) -> Block:
        assert token.map is not None
        marker = MARKER.fullmatch(comment.strip())
        words: set[str] = set()
        names: dict[str, str] = {}
        for item in marker["words"].split(",") if marker else []:
            word, _, name = item.strip().partition(" ")
            words.add(word)
            names[word] = name
        language = token.info.split(maxsplit=1)[0] if token.info else ""
        return Block(
            self.path,
            token.map[0] + 1,
            language,
            token.content,
            frozenset(words),
            names,
            (marker["reason"] or "").strip() if marker else "",
        )

    @cached_property
    def markers(self) -> int:
        """How many markers the page has, also those that stand before nothing."""
        return sum(token.type == "html_block" and "docs:" in token.content for token in self.tokens)

    @cached_property
    def links(self) -> list[tuple[int, str]]:
        """(line, target) of every link and picture."""
        return [
            (token.map[0] + 1 if token.map else 0, str(child.attrs.get("href") or child.attrs.get("src")))
            for token in self.tokens
            for child in token.children or []
            if child.type in ("link_open", "image")
        ]

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of headings, as GitHub makes them, and of `<a id="…">`."""
        found: set[str] = set(INLINE_HTML.findall(self.text))
        for heading, content in zip(self.tokens, self.tokens[1:], strict=False):
            if heading.type == "heading_open":
                anchor, repeated = slug(content), 0
                while f"{anchor}-{repeated}" in found if repeated else anchor in found:
                    repeated += 1
                found.add(f"{anchor}-{repeated}" if repeated else anchor)
        return found


def slug(heading: Token) -> str:
    text = "".join(child.content for child in heading.children or [])
    return NOT_IN_ANCHOR.sub("", text.lower()).replace(" ", "-")


@cache
def pages() -> list[Page]:
    """Every page that users read."""
    fronts = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    return [Page(path) for path in (*fronts, *sorted((ROOT / "docs").rglob("*.md")))]


@cache
def page_at(path: Path) -> Page:
    return Page(path)


def chain(block: Block) -> list[Block]:
    """A block after those that it continues, first of all the one that stands alone."""
    same = [b for b in page_at(block.page).blocks if b.language == block.language and b.line <= block.line]
    found = [same.pop()]
    while "continues" in found[0].words:
        if not same:
            raise ValueError(f"{found[0]}: there is no {block.language} block to continue")
        found.insert(0, same.pop())
    return found


def is_continued(block: Block) -> bool:
    """Whether the next block of its language runs it, too."""
    later = [b for b in page_at(block.page).blocks if b.language == block.language and b.line > block.line]
    return bool(later) and "continues" in later[0].words
