"""The scripts of a page, which ship inside the package and are put into the page: nothing is fetched.

uplot.js and uplot.css are uPlot 1.6.32, unchanged; uplot_license.txt is its MIT licence. charts.js draws
with it, for the report and for the live page.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

UPLOT = "uPlot 1.6.32"


@cache
def source(name: str) -> str:
    """The text of a file of this package, such as "charts.js"."""
    return files("shoal.report").joinpath(name).read_text(encoding="utf-8")


@cache
def report_script() -> str:
    """All that a report runs: uPlot with its licence, and what draws with it."""
    licence = f"/*! {UPLOT}\n{source('uplot_license.txt')} */"
    return "\n".join((licence, source("uplot.js"), source("charts.js"), source("report.js")))


@cache
def uplot_style() -> str:
    """The style sheet of uPlot."""
    return source("uplot.css")


def digest(text: str) -> str:
    """The word that allows an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
