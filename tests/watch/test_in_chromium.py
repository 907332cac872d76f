"""The live page and the report in a real browser: what is seen, keys, and whom it would shut out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Chromium, axe_or_skip, chromium_or_skip
from shoal.report import write_html
from shoal.watch import LivePage
from watch_events import report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.xdist_group("chromium")]

NAME, KILLED = "bmuf on train.py", "worker 2 was ended by SIGKILL"
EVIL = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    chromium_or_skip()
    with Chromium() as browser:
        yield browser


@pytest.fixture
def page() -> Iterator[LivePage]:
    with LivePage() as page:
        yield page


def play(page: LivePage, workers: int = 4, servers: int = 0, frames: int = 12, name: str = NAME) -> None:
    """A run of some seconds: all compute, one waits, and with a server worker 2 is killed."""
    page.start(name, workers, servers, facts="processes")
    for k in range(1, frames + 1):
        for rank in range(workers + servers):
            role = "worker" if rank < workers else "server"
            waits = {"state": "waiting", "awaits": "'mean' from worker 0"} if rank == 1 else {}
            counts = {"seconds": k / 2, "step": 8 * k, "samples": 64 * k, "bytes_sent": 9000 * k}
            figures = {"loss": 2 * math.exp(-k / 6), "staleness": 1.5 if role == "server" else None}
            event = report(rank, role=role, **counts, **figures, **waits)
            if servers and rank == 2 and k == 5:
                event |= {"lost": True, "state": "dead", "fault": KILLED}
            if not (servers and rank == 2 and k > 5):
                page.update(event)
        page._feed.tick()


def enter(browser: Chromium, field: str, value: str, event: str) -> None:
    element = f"document.getElementById('{field}')"
    browser.value(f"{element}.value = '{value}'; {element}.dispatchEvent(new Event('{event}'))")


def curve(workers: int) -> dict[str, object]:
    points = [
        {"seconds": i / 2, "samples": 64 * i, "test_accuracy": 97 - 80 / (1 + i), "test_loss": 2 / (1 + i)}
        for i in range(12)
    ]
    return {
        "strategy": "bmuf",
        "workers": workers,
        "seconds": 6.0,
        "samples_per_second": 900.0,
        "curve": points,
    }


def shown(browser: Chromium, state: str) -> int:
    return browser.value(f"document.querySelectorAll('#nodes > li.{state}').length")


def test_the_page_shows_workers_curves_and_faults(browser, page):
    play(page, workers=4, servers=1)
    browser.open(page.address)
    browser.until("document.querySelectorAll('#nodes > li').length === 5")
    assert (shown(browser, "dead"), shown(browser, "waiting"), shown(browser, "computing")) == (1, 1, 3)
    assert browser.value("document.getElementById('faults').textContent").endswith(KILLED)
    assert browser.value("document.querySelectorAll('.plot canvas').length") == 3  # no accuracy so far
    assert "tested after training" in browser.value("document.getElementById('no-accuracy').textContent")
    assert browser.value("document.getElementById('text').textContent").startswith("3 workers train")
    page.finish(curve(4))
    browser.until("document.getElementById('phase').textContent === 'done'")
    assert browser.value("document.querySelectorAll('.plot canvas').length") == 4
    assert browser.value("document.getElementById('pays').textContent").startswith("Does it pay? bmuf: ")


def test_the_slider_goes_back_to_an_earlier_moment(browser, page):
    play(page, workers=4, servers=1)
    browser.open(page.address)
    browser.until("document.querySelectorAll('#nodes > li.dead').length === 1")
    enter(browser, "slider", "1", "input")
    browser.until("document.querySelectorAll('#nodes > li.dead').length === 0")
    assert browser.value("document.getElementById('moment').textContent") == "1 of 6 s"
    assert browser.value("document.getElementById('faults').children.length") == 0
    browser.value("document.getElementById('latest').click()")
    browser.until("document.querySelectorAll('#nodes > li.dead').length === 1")


def test_keys_go_from_point_to_point_and_zoom(browser, page):
    play(page)
    browser.open(page.address)
    browser.until("document.querySelector('#loss canvas') !== null")
    press = "(key => document.getElementById('loss').dispatchEvent(new KeyboardEvent('keydown', {key})))"
    browser.value(f"{press}('ArrowLeft')")
    spoken = browser.value("document.querySelector('#loss [aria-live]').textContent")
    assert spoken == "bmuf on train.py: loss 0.2707 after 6 s, 3,072 samples"
    browser.value(f"{press}('+')")
    assert browser.value("document.querySelector('#loss .reset').hidden") is False
    browser.value(f"{press}('Escape')")
    assert browser.value("document.querySelector('#loss .reset').hidden") is True


def test_runs_can_be_hidden_and_chosen(browser, page):
    for name in ("single", "sync"):
        play(page, workers=2, name=name)
        page.finish(curve(2))
    browser.open(page.address)
    browser.until("document.querySelectorAll('#legend button').length === 2")
    browser.value("document.querySelector('#legend button').click()")
    assert browser.value("document.querySelector('#legend button').getAttribute('aria-pressed')") == "false"
    enter(browser, "run", "0", "change")
    browser.until("document.getElementById('name').textContent === 'single'")


@pytest.mark.parametrize("workers", [4, 64, 300])
@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 360)])
def test_the_page_fits_and_has_no_serious_accessibility_findings(browser, page, workers, dark, width):
    axe_or_skip()
    play(page, workers=workers, servers=1, frames=6)
    page.print("worker 0", "epoch 1")
    page.finish(curve(workers))
    browser.open(page.address, width=width, dark=dark)
    browser.until(f"document.querySelectorAll('#nodes > li').length === {workers + 1}")
    browser.value("document.getElementById('table-details').open = true")
    browser.until(f"document.querySelectorAll('#table tbody tr').length === {workers + 1}")
    assert browser.value("document.documentElement.scrollWidth") <= width
    cards = "[...document.querySelectorAll('#nodes .who')]"  # a name and a state, beside each other
    assert browser.value(f"{cards}.every(card => card.scrollWidth <= card.clientWidth)")
    assert browser.serious_findings() == []


def test_names_and_output_that_hold_a_script_are_harmless(browser, page):
    browser.messages.clear()
    page.start(f"{EVIL} on {EVIL}.py", 2, facts=EVIL)
    page.update(report(0, seconds=2.0))
    page.update(report(1, seconds=2.0, state="waiting", awaits=EVIL, fault=EVIL))
    page.print(f"worker {EVIL}", EVIL)
    page._feed.tick()
    page.start(EVIL, 2)
    page.update(report(0, state=EVIL, seconds=1.0))
    page.finish({**curve(2), "strategy": EVIL})
    browser.open(page.address)
    browser.until("document.querySelectorAll('#legend button').length === 2")
    enter(browser, "run", "0", "change")
    browser.until("document.getElementById('faults').children.length === 1")
    assert EVIL in browser.value("document.getElementById('output').textContent")
    assert browser.value("document.querySelectorAll('main script, main img').length") == 0
    assert browser.value("window.harmed") is None


def test_the_page_asks_its_own_server_alone(browser, page):
    browser.requests.clear()
    browser.messages.clear()
    play(page)
    browser.open(page.address)
    browser.until("document.querySelectorAll('.plot canvas').length === 2")
    asked = [address for address in browser.requests if not address.startswith(("data:", "about:"))]
    assert asked and all(address.startswith(page.address) for address in asked)
    assert browser.messages == []  # no error of a script, nothing that the policy refused


def test_the_report_is_interactive_and_asks_for_nothing(browser, tmp_path: Path):
    runs = [
        {**curve(n), "strategy": word, "task": EVIL} for n, word in ((1, "single"), (4, "sync"), (4, EVIL))
    ]
    address = write_html(runs, tmp_path / "report.html").as_uri()
    browser.requests.clear()
    browser.messages.clear()
    browser.open(address)
    browser.until("document.querySelectorAll('.plot canvas').length === 4")
    assert browser.requests == [address] and browser.messages == []
    assert browser.value("window.harmed") is None
    assert browser.value("getComputedStyle(document.querySelector('.live > svg')).display") == "none"
    browser.value("document.querySelector('.legend button').click()")
    assert browser.value("document.querySelector('.legend button').getAttribute('aria-pressed')") == "false"
    first = "document.querySelector('table.summary tbody th').textContent"
    browser.value("document.querySelector('table.summary th button').click()")
    browser.value("document.querySelector('table.summary th button').click()")
    assert (
        browser.value("document.querySelector('table.summary th').getAttribute('aria-sort')") == "ascending"
    )
    assert browser.value(first).startswith("<script>")
    axe_or_skip()
    assert browser.serious_findings() == []


def test_the_report_on_paper_is_the_picture(browser, tmp_path: Path):
    browser.open(write_html([curve(4)], tmp_path / "report.html").as_uri())
    browser.until("document.querySelectorAll('.plot canvas').length === 4")
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.value("getComputedStyle(document.querySelector('.live > svg')).display") == "block"
        assert browser.value("getComputedStyle(document.querySelector('.plot')).display") == "none"
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
