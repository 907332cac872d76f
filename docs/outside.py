"""A hook of MkDocs: pages and sources beside docs/ become pages of the site, and links lead to them."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
MARKER = re.compile(r"^ *<!-- docs: .*? -->\n", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/, and every source file that a page links to."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    texts = {normpath(f"docs/{file.src_uri}"): file.content_string for file in files.documentation_pages()}
    texts |= {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    for path in sorted({target for origin, text in texts.items() for target in sources(origin, text)}):
        files.append(File.generated(config, place_of(path), content=listing(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links that leave docs/ to the pages made for them, and leave out the markers of the tests."""
    origin = origin_of(page.file.src_uri)
    here = page.file.src_uri.rpartition("/")[0] or "."

    def turned(match: re.Match[str]) -> str:
        path = resolved(origin, match["target"])
        if path is None:
            return match[0]
        return relpath(place_of(path), here) + (match["anchor"] or "")

    return LINK.sub(turned, MARKER.sub("", markdown))


def origin_of(place: str) -> str:
    """The path in the repository of a page of the site."""
    beside = {made: path for path, made in PAGES.items()}
    return beside.get(place, f"docs/{place}")


def resolved(origin: str, target: str) -> str | None:
    """The path in the repository that a relative link names, or None for an address."""
    if ":" in target or origin.startswith("docs/code/"):
        return None
    return normpath(f"{origin.rpartition('/')[0] or '.'}/{target}")


def sources(origin: str, text: str) -> list[str]:
    """The files outside docs/ that a page links to, except those that are pages themselves."""
    found = [resolved(origin, match["target"]) for match in LINK.finditer(text)]
    return [
        path for path in found if path and path not in PAGES and (ROOT / path).is_file() and is_outside(path)
    ]


def is_outside(path: str) -> bool:
    return not path.startswith("docs/") or path.endswith(".py")


def place_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return f"code/{path}.md" if is_outside(path) else path.removeprefix("docs/")


def listing(path: str) -> str:
    """A page that shows a source file."""
    language = "python" if path.endswith(".py") else "text"
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n``````{language}\n{text}``````\n"
