"""A worker joins a run that is under way over gRPC, and every sample still counts once an epoch.

The joiner is a thread of the test, so that it comes while the run is young: worker 0 is stopped until then.
"""

import logging
import multiprocessing
import os
import shlex
import signal
import threading
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

import shoal
from shoal.core.errors import Unavailable
from shoal.launch import newcomer
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
                joining.check_data(plan, call.granted["data"])
                joining.prepare(plan, call, place[0], str(self._folder))
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


class WaitsForThem(Control):
    """Has the worker that joined wait between two steps, from a moment on, until another is back."""

    def __init__(self):
        super().__init__()
        self.is_to_wait, self.is_back = threading.Event(), threading.Event()

    def heard(self, step=0):
        if self.is_to_wait.is_set():
            assert self.is_back.wait(100)


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


@pytest.mark.parametrize(("step", "is_told_why"), [(0, True), (5, False)])
def test_one_whose_run_ends_is_too_late_only_if_it_has_taken_no_part(step, is_told_why, monkeypatch):
    class EndsSoon:
        def __init__(self, workers, servers, start, listen, *limits, look):
            self._listen = listen

        def see_through(self):
            self._listen({"step": step})
            return [{}]

    monkeypatch.setattr(newcomer, "Crew", EndsSoon)
    call = SimpleNamespace(lost_for=0.0, address="here", tell=lambda event: None)
    with pytest.raises(Unavailable, match="before this worker could") if is_told_why else nullcontext():
        assert newcomer.take_part(call, lambda: None, 1.0, 1.0, lambda event: None) == {}


@pytest.mark.soak  # those below join as well
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


@pytest.mark.soak  # test_killed_and_resumed.py kills all but one as well, and the one above has somebody join
def test_the_run_goes_on_with_one_that_joined_when_all_of_its_own_workers_are_killed(joined, tmp_path):
    """It has the model, and gives it to them when they are back; the checkpoints do without its part."""
    control, files = WaitsForThem(), tmp_path / "saved"

    def heard(event):
        if event["rank"] == 2 and event["step"] > 40 and not control.is_to_wait.is_set():
            control.is_to_wait.set()
            for process in multiprocessing.active_children():
                if process.name in ("worker 0", "worker 1"):
                    os.kill(process.pid, signal.SIGKILL)
        elif event.get("fault") == "worker 1 is back":
            control.is_back.set()

    result, joiner = joined("sync", control, epochs=12, on_progress=heard, checkpoint=files, every=20)
    assert joiner.failure is None
    assert joiner.report["steps"] > 40
    assert result.samples == 12 * SAMPLES
    assert [node["rank"] for node in result.record()["nodes"]] == [0, 1, 2]
    assert (files / "model.safetensors").exists()
    again = shoal.run("digits", "sync", workers=2, epochs=13, checkpoint=files, every=20, threads=1, tests=0)
    assert again.samples == 13 * SAMPLES
