"""Every link in the README, the documentation, CONTRIBUTING and CHANGELOG leads somewhere.

Addresses on the network are checked for their form only: a test asks no other host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pages import ROOT, Page, page_at, pages

ADDRESS = ("http", "https", "mailto")


def dead_links(page: Page) -> Iterator[str]:
    for line, target in page.links:
        if fault := fault_of(page, target):
            yield f"{page.path.name}:{line}: {target}: {fault}"


def fault_of(page: Page, target: str) -> str | None:
    try:
        parts = urlsplit(target)
    except ValueError as error:
        return str(error)
    if parts.scheme:
        well_formed = parts.scheme == "mailto" or "." in (parts.hostname or "")
        return None if parts.scheme in ADDRESS and well_formed else "no address of a page"
    path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    if not path.exists():
        return "there is no such file"
    if not path.is_relative_to(ROOT):
        return "outside the repository"
    if parts.fragment and path.suffix == ".md" and unquote(parts.fragment) not in page_at(path).anchors:
        return "the page has no such heading"
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path.name)
def test_links_lead_somewhere(page: Page):
    assert not list(dead_links(page))


def test_there_are_links_to_check():
    assert {page.path.name for page in pages() if page.links} >= {"README.md", "CONTRIBUTING.md", "index.md"}
    assert any("#" in target for page in pages() for _, target in page.links)


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("nowhere.md", "no such file"),
        ("guide.md#nothing", "no such heading"),
        ("#nothing", "no such heading"),
        ("../../x.md", "no such file"),
        ("htp://example.org", "no address"),
        ("https://example", "no address"),
    ],
)
def test_a_dead_link_is_caught(link: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("test_links.ROOT", tmp_path)
    (tmp_path / "guide.md").write_text("# Guide\n\n## Which `codec`?\n")
    page = tmp_path / "page.md"
    page.write_text(f"[a]({link}), [b](guide.md#which-codec), [c](https://example.org/a#b), `[d](e.md)`\n")
    (found,) = dead_links(Page(page))
    assert fault in found
