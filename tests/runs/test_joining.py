"""A worker joins a run that is under way over gRPC, and every sample still counts once an epoch.

The joiner is a thread of the test, so that it comes while the run is young: worker 0 is stopped until then.
"""

import logging
import multiprocessing
import os
import shlex
import signal
import threading
from contextlib import closing
from dataclasses import replace

import pytest

import shoal
from shoal.launch.control import Control
from shoal.launch.join import Access
from shoal.launch.place_call import PlaceCall
from shoal.runs import joining, node_process
from shoal.runs.plan_words import plan_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SAMPLES = 1437  # of digits


class Leaves(Control):
    """Has a worker stop after a few steps, as Ctrl-C does; never by default."""

    def __init__(self, steps=None):
        super().__init__()
        self._last, self._steps = steps, 0

    def heard(self, step=0):
        self._steps += 1
        if self._steps != self._last:
            return None
        return {"order": "run to", "step": step, "final": True}


class Joiner(logging.Handler):
    """Stops worker 0 and joins as soon as the run says how to; lets worker 0 go when it is connected."""

    def __init__(self, folder, control, connect):
        super().__init__()
        self.lines, self.failure, self.report = [], None, {}
        self._folder, self._control, self._connect = folder, control, connect
        self._thread = threading.Thread(target=self._join)

    def emit(self, record):
        self.lines.append(record.getMessage())
        if "to join: " in self.lines[-1]:
            (self._worker,) = (p for p in multiprocessing.active_children() if p.name == "worker 0")
            os.kill(self._worker.pid, signal.SIGSTOP)
            self._words = shlex.split(self.lines[-1].partition("to join: ")[2])
            self._thread.start()

    def connected(self, *args, **options):
        """Connect as a node does; then the run goes on."""
        transport = self._connect(*args, **options)
        os.kill(self._worker.pid, signal.SIGCONT)
        return transport

    def _join(self):
        shoal_, join, address, option, token = self._words
        assert (shoal_, join, option) == ("shoal", "join", "--token-file")
        access = Access(token_file=token)
        try:
            with closing(PlaceCall(address, access)) as call:
                plan = replace(plan_of(call.granted["plan"]), access=access, joins=True)
                place = call.granted["rank"], 0
                joining._check_data(plan, call.granted["data"])
                joining._prepare(plan, call, place[0], str(self._folder))
                incarnation = call.granted["incarnation"]
                self.report = node_process.live(plan, place, incarnation, self._control, str(self._folder))
                self.report.pop("snapshots")
                call.tell({"event": "done", "report": self.report})
        except BaseException as failure:
            self.failure = failure
            os.kill(self._worker.pid, signal.SIGCONT)

    def __enter__(self):
        logging.getLogger("shoal").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("shoal").removeHandler(self)
        self._thread.join()


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """Runs two workers with a third that joins: the result, and the joiner."""

    def run(strategy, control, **settings):
        joiner = Joiner(tmp_path, control, node_process.connect)
        monkeypatch.setattr(node_process, "connect", joiner.connected)
        with joiner:
            common = {"workers": 2, "max_workers": 3, "transport": "grpc", "threads": 1, "tests": 0}
            result = shoal.run("digits", strategy, **common, **settings)
        return result, joiner

    return run


@pytest.mark.parametrize("strategy", ["sync", "bmuf"])
def test_a_worker_that_joins_does_its_share_and_is_in_the_record(joined, strategy):
    result, joiner = joined(strategy, Leaves(), epochs=12)
    assert joiner.failure is None
    nodes = {node["rank"]: node["samples"] for node in result.record()["nodes"]}
    assert nodes.keys() == {0, 1, 2} and min(nodes.values()) > SAMPLES
    assert sum(nodes.values()) == result.samples == 12 * SAMPLES
    assert result.test_accuracy > 90
    assert "worker 2 joins from 127.0.0.1" in joiner.lines
    assert not any("has left" in line for line in joiner.lines)


def test_one_that_says_goodbye_leaves_its_batches_to_the_others(joined):
    result, joiner = joined("bmuf", Leaves(steps=30), epochs=12)
    assert isinstance(joiner.failure, shoal.Interrupted)
    assert [node["rank"] for node in result.record()["nodes"]] == [0, 1]
    assert result.samples == 12 * SAMPLES
    assert not any(node["faults"] for node in result.record()["nodes"])  # nobody was lost
    assert "worker 2 has left; its place is open" in joiner.lines
