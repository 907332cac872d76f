"""Reports that travel together arrive as they do alone, and only those of what passed are kept waiting."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import one_message
from one_message import Together, take_apart

CONFTEST = """
import pytest
from one_message import send_together as pytest_configure
from one_message import take_apart as pytest_configure_node

@pytest.fixture
def no_setup():
    pytest.fail("no setup")

@pytest.fixture
def no_teardown():
    print("on the way out")
    yield
    pytest.fail("no teardown")
"""
TESTS = """
import os, pytest

def test_passes(record_property):
    record_property("colour", "red")

def test_fails():
    assert 1 == 2

def test_is_skipped():
    pytest.skip("why")

@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail():
    assert False

def test_has_no_setup(no_setup): ...
def test_has_no_teardown(no_teardown): ...

def test_ends_its_process():
    os._exit(3)

def test_comes_last(): ...
"""


def report(when: str, outcome: str = "passed") -> dict[str, Any]:
    return {"when": when, "outcome": outcome}


def messages(*reports: dict[str, Any]) -> list[list[str]]:
    """What is sent of a test with these reports, by message."""
    sent: list[tuple[str, dict[str, Any]]] = []
    send = Together(lambda name, **content: sent.append((name, content)))
    send("logstart", nodeid="a")
    for data in reports:
        send("testreport", data=data)
    send("logfinish", nodeid="a")
    send("runtest_protocol_complete", item_index=0)
    found: list[list[str]] = []
    node = SimpleNamespace(process_from_remote=lambda event: found[-1].append(told(*event)))
    take_apart(node)
    for message in sent:
        found.append([])
        node.process_from_remote(message)
    return found


def told(name: str, content: dict[str, Any]) -> str:
    return "{when} {outcome}".format(**content["data"]) if name == "testreport" else name


def test_all_of_a_test_that_passes_is_one_message_in_order():
    passed = ["setup passed", "call passed", "teardown passed"]
    assert messages(report("setup"), report("call"), report("teardown")) == [
        ["logstart", *passed, "logfinish", "runtest_protocol_complete"]
    ]


def test_a_failure_is_sent_at_once():
    assert messages(report("setup"), report("call", "failed"), report("teardown")) == [
        ["logstart", "setup passed", "call failed"],
        ["teardown passed", "logfinish", "runtest_protocol_complete"],
    ]


def test_what_is_no_report_comes_as_it_was_sent():
    seen: list[Any] = []
    node = SimpleNamespace(process_from_remote=seen.append)
    take_apart(node)
    end = object()
    for message in [("workerready", {"workerinfo": {}}), end]:
        node.process_from_remote(message)
    assert seen == [("workerready", {"workerinfo": {}}), end]


@pytest.mark.soak  # every run of the tests is such a run
@pytest.mark.usefixtures("warm_programs")
def test_a_run_reports_what_it_reports_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(one_message.__file__).parent))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_all.py").write_text(TESTS)
    (cases, phases), (all_cases, all_phases) = (
        run(tmp_path, "-q"),
        run(tmp_path, "-v"),
    )  # with -v nothing waits
    assert cases == all_cases and len(cases) == TESTS.count("def ")
    assert all_phases - phases == {("setup", "test_all.py::test_ends_its_process")} and phases < all_phases


def run(folder: Path, option: str) -> tuple[list[tuple[str, ...]], set[tuple[str, str]]]:
    """What the report file says of each test, but for the times, and the phases that --durations lists."""
    line = "-m pytest -p no:cacheprovider -n 1 --durations 0 --durations-min 0 --junitxml report.xml"
    done = subprocess.run(
        [sys.executable, *line.split(), option], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 3 passed, 1 skipped, 1 xfailed, 2 errors" in done.stdout, done.stdout
    durations = re.findall(r"^[\d.]+s (setup|call|teardown) +(.*)", done.stdout, re.MULTILINE)
    cases = ElementTree.parse(folder / "report.xml").iter("testcase")
    return [said(case) for case in cases], set(durations)


def said(case: ElementTree.Element) -> tuple[str, ...]:
    """A test and all that the report file has inside it."""
    parts = [ElementTree.tostring(part, encoding="unicode") for part in case]
    return case.get("name", ""), *parts
