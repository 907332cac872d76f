"""The page of a split in a browser: it fetches nothing, fits a narrow screen, and timelines fill it."""

import pytest
import torch
from torch import nn

from chromium import Chromium, chromium_or_skip
from shoal.pipelines.chain import trace
from shoal.pipelines.layer_costs import LayerCost
from shoal.pipelines.proposal import Proposal
from shoal.pipelines.split_page import split_page
from shoal.sim import Network


@pytest.fixture
def page(tmp_path):
    chain = trace(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))), torch.ones(1, 2))
    costs = [LayerCost(name, 0.001, 0.002, 64, 64, state_bytes=1000) for name in chain.names]
    made = Proposal(chain, costs, (0, 2, 4, 6, 8), tuple(range(9)), 8, 16, Network(1e-4, 1e8))
    path = tmp_path / "split.html"
    path.write_text(split_page(made, "eight layers"))
    return path


def test_the_page_names_model_devices_and_every_pass(page):
    told = page.read_text()
    assert "<h1>eight layers on 4 devices</h1>" in told
    for kind in ("forward", "backward"):
        assert told.count(f"<title>{kind} of microbatch 3, ") == 4 + 4 + 8
    assert "stage 7 (layers 7): " in told  # of the interleaved schedule


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [pytest.param(1200, False, marks=pytest.mark.soak), (380, True)])
def test_it_fits_the_screen_and_fetches_nothing(page, width, dark):
    chromium_or_skip()
    with Chromium() as browser:
        browser.open(page.as_uri(), width, 900, dark)
        assert browser.requests == [page.as_uri()]
        assert browser.messages == []
        assert browser.value("document.documentElement.scrollWidth") == width
        box = "getBoundingClientRect()"
        (chart, pieces) = browser.value(
            "(() => { const chart = document.querySelector('svg.pipeline');"
            f"const ends = [...chart.querySelectorAll('.piece')].map(piece => piece.{box}.right);"
            f"return [chart.{box}.right, Math.max(...ends)]; }})()"
        )
        assert pieces == pytest.approx(chart, abs=1)
        shown = browser.value("getComputedStyle(document.querySelector('.pipeline .number')).display")
        assert (shown == "none") == (width < 560)
