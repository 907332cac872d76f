"""The site has every page, and the reference every public name. `make docs` builds it."""

from __future__ import annotations

import re

import pytest

import shoal
from pages import ROOT, page_at
from shoal.codecs import CODECS
from shoal.strategies import STRATEGIES

DOCS = ROOT / "docs"
BESIDE = {"changelog.md", "contributing.md", "overview.md"}  # docs/outside.py makes them of README.md …


def in_navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(
        r"^ +- .*?: ([\w/]+\.md)$", text[text.index("\nnav:") : text.index("\nvalidation:")], re.M
    )


def documented() -> set[str]:
    """What the pages of the reference ask mkdocstrings for."""
    pages = (DOCS / "reference").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)}


def test_navigation_has_every_page_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(in_navigation()) == sorted(pages | BESIDE)


def test_the_index_names_every_page():
    linked = {(DOCS / target.partition("#")[0]).resolve() for _, target in page_at(DOCS / "index.md").links}
    assert {*DOCS.glob("*.md")} - {DOCS / "index.md"} <= linked


def test_the_reference_has_every_public_name():
    homes = {home.replace(":", ".") for home in shoal._HOMES.values()}
    elsewhere = {
        "shoal.sim.Compute",
        "shoal.sim.Faults",
        "shoal.sim.Network",
    }  # listed where they are defined
    assert not homes - documented() - elsewhere
    assert {"shoal.sim.models.Compute", "shoal.sim.faults.Faults", "shoal.sim.models.Network"} <= documented()


@pytest.mark.slow
def test_the_reference_has_every_strategy_and_codec():
    for catalogue, page in ((STRATEGIES, "strategies.md"), (CODECS, "codecs.md")):
        text = (DOCS / "reference" / page).read_text()
        words = re.findall(r"^## `(\w+)`$", text, re.M)
        assert words == list(catalogue)
        for word in words:
            kind = catalogue[word]
            assert f"::: {kind.__module__}.{kind.__qualname__}\n" in text, word
