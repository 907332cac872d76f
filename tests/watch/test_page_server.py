"""The page's address: the token, what may be loaded, and the stream of changes."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.report.scripts import source
from shoal.watch import LivePage
from shoal.watch.page_server import page_files
from watch_events import report


@pytest.fixture
def page() -> Iterator[LivePage]:
    with LivePage() as page:
        page.start("bmuf on train.py", 2)
        yield page


def port_of(page: LivePage) -> int:
    return int(page.address.split(":")[2].split("/")[0])


def ask(page: LivePage, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(page), timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def token(page: LivePage) -> str:
    return page.address.split("/")[3]


class Stream:
    """The server-sent events of a page."""

    def __init__(self, page: LivePage) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port_of(page), timeout=20)
        self.connection.request("GET", f"/{token(page)}/events")
        self.answer = self.connection.getresponse()

    def next(self) -> tuple[str, Any]:
        lines = [self.answer.readline().decode() for _ in range(3)]
        return lines[0].removeprefix("event: ").strip(), json.loads(lines[1].removeprefix("data: "))

    def until(self, wanted: str) -> Any:
        while (said := self.next())[0] != wanted:
            pass
        return said[1]

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def test_the_page_and_its_files_are_served_with_the_token_only(page):
    for name in page_files():
        assert ask(page, f"/{token(page)}/{name}")[0] == 200
        for wrong in (f"/{name}", f"/wrong/{name}", f"/{token(page)}x/{name}", f"/{token(page)[:-1]}/{name}"):
            assert ask(page, wrong)[0] == 403
    assert ask(page, "/wrong/events")[0] == 403
    assert ask(page, f"/{token(page)}")[0] == 403  # the address ends in a slash
    assert ask(page, f"/{token(page)}/other.js")[0] == 404


def test_a_name_that_only_leads_here_is_refused(page):
    assert ask(page, f"/{token(page)}/", Host="evil.example:80")[0] == 403
    assert ask(page, f"/{token(page)}/", Host="localhost:1234")[0] == 200  # through a forwarded port


def test_the_page_may_load_nothing_from_elsewhere(page):
    for name in page_files():
        policy = ask(page, f"/{token(page)}/{name}")[1]["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy and "http" not in policy


def test_no_file_of_the_page_names_an_address():
    for name, (_, body) in page_files().items():
        text = body.decode().replace(source("uplot.js"), "").replace(source("uplot.css"), "")
        assert not re.search(r"https?://|url\(|@import", text), name
    assert re.findall(r"https?://[^\s*]+", source("uplot.js")) == ["https://github.com/leeoniya/uPlot"]


def test_each_run_has_a_token_of_its_own():
    with LivePage() as first, LivePage() as second:
        assert token(first) != token(second) and len(token(first)) >= 20
        assert ask(first, f"/{token(second)}/")[0] == 403


def test_a_browser_gets_all_so_far_and_then_each_change(page):
    page.update(report(0))
    page.print("worker 0", "hello")
    stream = Stream(page)
    kind, everything = stream.next()
    assert kind == "all" and [run["name"] for run in everything["runs"]] == ["bmuf on train.py"]
    assert everything["lines"] == [["worker 0", "hello"]]
    page.update(report(1, loss=float("nan"), state="waiting"))
    change = stream.until("frame")
    while change["frame"]["nodes"][1][0] != "waiting":
        change = stream.until("frame")
    assert change["frame"]["nodes"][1][3] is None  # NaN is no JSON
    page.finish({"strategy": "bmuf", "workers": 2, "seconds": 3.0, "samples_per_second": 900.0})
    while not (change := stream.until("frame"))["over"]:
        pass
    assert change["phase"] == "done" and change["verdict"].startswith("bmuf: ")
    stream.close()


def test_a_line_reaches_each_browser_once():
    from shoal.watch.feed import Feed

    feed = Feed()
    early = feed.subscribe()
    feed.print("worker 0", "hello")
    late = feed.subscribe()  # between two ticks
    feed.tick()
    assert early is not None and late is not None
    assert b"hello" not in early.first and b"hello" in late.first
    assert late.has_read_all and not early.has_read_all


def test_the_end_of_a_run_reaches_the_browser_with_its_reason():
    page = LivePage()
    page.start("sync", 1)
    stream = Stream(page)
    assert stream.next()[0] == "all"
    page.__exit__(RuntimeError, RuntimeError("worker 1 failed"), None)
    change = stream.until("frame")
    while not change["over"]:
        change = stream.until("frame")
    assert change["phase"] == "ended: worker 1 failed"
    stream.until("end")
    stream.close()


def test_too_many_browsers_are_turned_away_and_leave_no_trace(page, monkeypatch):
    monkeypatch.setattr("shoal.watch.feed.MOST_BROWSERS", 1)
    first = Stream(page)
    assert first.next()[0] == "all"
    assert ask(page, f"/{token(page)}/events")[0] == 503
    first.close()


def test_a_browser_that_does_not_read_is_given_up(monkeypatch):
    from shoal.watch.feed import Feed
    from shoal.watch.timeline import Timeline

    monkeypatch.setattr("shoal.watch.feed.MOST_UNREAD", 3)
    feed = Feed()
    slow = feed.subscribe()
    assert slow is not None
    feed.start(Timeline("sync", 1))
    for k in range(5):
        feed.add(report(0, seconds=float(k)))
        feed.tick()
    assert slow.is_slow
