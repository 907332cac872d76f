"""Whatever happens to the launcher or to a member, no process of a run is left, and nobody waits in vain."""

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked import ForkedPython
from shoal.core.errors import Interrupted, ShoalError, WorkerFailed
from shoal.launch import crew as module
from shoal.launch.crew import Crew, Member
from shoal.launch.drive import drive
from shoal.launch.environment import VARIABLE, Place
from shoal.launch.newcomer import take_part

LAUNCHER = """
import sys
sys.path.insert(0, {folder!r})
import sabotage, shoal
from shoal.testing import blobs
if __name__ == "__main__":
    shoal.run(blobs(), sabotage.Slow(), workers=2, epochs=1000,
              on_progress=lambda event: print("going", flush=True))
"""


def in_session(session: int) -> set[int]:
    """The live processes of a session."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if int(fields[3]) == session and fields[0] != "Z":
                found.add(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for orphans in /proc")
@pytest.mark.parametrize(
    "end",
    [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.soak) for s in (signal.SIGTERM, signal.SIGINT))],
)
def test_no_process_outlives_its_launcher(end, tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER.format(folder=str(Path(__file__).parent.parent / "support")))
    launcher = ForkedPython([sys.executable, str(script)])  # in a session of its own
    try:
        assert launcher.stdout.readline() == "going\n"
        assert len(in_session(launcher.pid)) >= 4  # the launcher, two workers, and what forks them
        os.kill(launcher.pid, end)
        deadline = time.monotonic() + 60  # far more than it takes, on a busy machine too
        while in_session(launcher.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert in_session(launcher.pid) == set()
    finally:
        launcher.kill()
        launcher.communicate(timeout=5)
    assert launcher.returncode != 0


def test_a_place_travels_through_the_environment(monkeypatch):
    place = Place(rank=2, nodes=5, launched="shoal", strategy="bmuf", strategy_options={"period": "8"})
    for name, value in place.to_environment().items():
        monkeypatch.setenv(name, value)
    assert Place.find() == place


def test_torchrun_s_variables_are_understood(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Place.find() == Place(rank=1, nodes=4, launched="torchrun", transport="gloo")


def test_a_process_started_by_hand_is_alone(monkeypatch):
    for name in (VARIABLE, "RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert Place.find() == Place()


def test_a_coroutine_that_suspends_on_a_real_transport_is_a_bug_and_says_so():
    from shoal.sim.kernel import suspended

    async def waits():
        await suspended()

    with pytest.raises(RuntimeError, match="a verb suspended"):
        drive(waits())


class Started:
    """A process that is one by its looks alone: it runs until somebody ends it."""

    def __init__(self) -> None:
        self.exitcode: int | None = None
        self.on_kill = lambda: None

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            self.exitcode = -signal.SIGKILL
            self.on_kill()

    def join(self, timeout: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def member(rank: int) -> tuple[Member, Connection]:
    """A member, and its own end of the line."""
    ours, theirs = Pipe()
    return Member(rank, f"worker {rank}", Started(), ours), theirs


def say(line: Connection, event: str, **fields: object) -> None:
    line.send_bytes(json.dumps({"event": event, **fields}).encode())


def test_those_already_started_are_ended_when_another_cannot_be():
    first, line = member(0)

    def start(rank: int, incarnation: int) -> Member:
        if rank == 1:
            raise OSError("no more processes")
        return first

    with line, pytest.raises(OSError, match="no more processes"):
        Crew(2, 0, start).see_through()
    assert not first.process.is_alive()


def test_one_that_joined_a_run_that_stays_away_ends_although_its_process_says_nothing():
    worker, line = member(0)
    say(line, "ready")
    call = SimpleNamespace(lost_for=31.0, address="host:1")
    with line, pytest.raises(ShoalError, match="the run at host:1 has been away for 30 s; it is over"):
        take_part(call, lambda: worker, 1.0, 1.0, lambda event: None)
    assert not worker.process.is_alive()


def test_ctrl_c_while_processes_are_started_ends_those_that_were():
    first, line = member(0)

    def start(rank: int, incarnation: int) -> Member:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        assert rank == 0, "no more are started"
        return first

    with line, pytest.raises(Interrupted, match="before training began"):
        Crew(2, 0, start).see_through()
    assert not first.process.is_alive()


def test_a_failure_that_nobody_is_left_to_explain_is_told_at_once():
    pairs = [member(rank) for rank in range(2)]
    for _, line in pairs:
        say(line, "ready")
        say(line, "failed", message="the other was lost", details="", follows=True)
        line.close()
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="worker 0 failed: the other was lost"):
        Crew(2, 0, lambda rank, _: pairs[rank][0]).see_through()
    assert time.monotonic() - began < module.CAUSE_SECONDS / 2


def test_while_the_cause_of_a_failure_is_waited_for_the_launcher_sleeps():
    pairs = [member(rank) for rank in range(2)]
    for _, line in pairs:
        say(line, "ready")
    say(pairs[0][1], "failed", message="the other was lost", details="", follows=True)
    busy = time.process_time()
    with pytest.raises(WorkerFailed, match="worker 0 failed: the other was lost"):
        Crew(2, 0, lambda rank, _: pairs[rank][0]).see_through()
    assert time.process_time() - busy < module.CAUSE_SECONDS / 4
    for _, line in pairs:
        line.close()


def test_one_that_is_killed_while_another_has_failed_is_not_the_cause():
    (killed, line), (failed, other) = member(0), member(1)
    say(other, "failed", message="the loss is not finite", details="", follows=False)
    crew = Crew(2, 0, lambda rank, _: (killed, failed)[rank])
    crew.members += [killed, failed]
    crew._hear([failed], 1.0)
    killed.process.kill()
    crew._gone(killed)
    with line, other, pytest.raises(WorkerFailed, match=r"worker 1 failed: the loss is not finite$"):
        crew._fail()


def test_who_dies_and_is_done_without_is_told_to_the_listener():
    pairs = [member(rank) for rank in range(3)]
    heard: list[dict[str, object]] = []
    for _, line in pairs:
        say(line, "ready")
    say(pairs[1][1], "progress", rank=1, role="worker", step=7)
    for rank in (0, 2):
        say(pairs[rank][1], "done", rank=rank)
        pairs[rank][1].close()
    pairs[1][0].process.kill()  # and nothing more comes from it
    pairs[1][1].close()
    crew = Crew(2, 1, lambda rank, _: pairs[rank][0], heard.append)
    crew._went_at = 1.0
    crew.see_through()
    last = {event["rank"]: event for event in heard}
    assert last[1]["lost"] is True and last[1]["state"] == "dead" and last[1]["step"] == 7
    assert str(last[1]["fault"]).startswith("worker 1 was ended by SIG")
    assert last[0]["state"] == last[2]["state"] == "done"
    assert (last[0]["role"], last[2]["role"]) == ("worker", "server")
    assert all(float(str(event["seconds"])) >= 0 for event in heard)


def test_a_server_that_is_started_again_is_lost_then_joining_then_back():
    worker, first, second = member(0), member(1), member(1)
    second[0].incarnation = 1
    heard: list[dict[str, object]] = []

    def listener(event: dict[str, object]) -> None:
        heard.append(event)
        if event.get("state") == "joining":
            say(second[1], "ready")
            say(second[1], "done", rank=1)
            second[1].close()
            say(worker[1], "done", rank=0)
            worker[1].close()

    def start(rank: int, incarnation: int) -> Member:
        return (worker[0], (first, second)[incarnation][0])[rank]

    say(worker[1], "ready")
    say(first[1], "ready")
    say(first[1], "progress", rank=1, role="server", step=40, state="computing")
    first[0].process.kill()
    first[1].close()
    crew = Crew(1, 1, start, listener, restarts=True)
    crew._went_at = 1.0
    crew.see_through()
    told = [(event["state"], event["step"], event.get("fault")) for event in heard if event["rank"] == 1]
    assert told[0] == ("computing", 40, None)
    assert told[1][:2] == ("dead", 40) and "SIG" in str(told[1][2])
    assert told[2:] == [("joining", 40, None), ("waiting", 40, "worker 1 is back"), ("done", 40, None)]


class Kept:
    """A crew of two workers and their keeper, all ready. Notes who is started; `successor` is worker 1's."""

    def __init__(self) -> None:
        pairs, self.started = [member(rank) for rank in range(3)], list[tuple[int, int]]()
        self.lines = [line for _, line in pairs]
        self.successor, self.successors_line = member(1)
        self.successor.incarnation = 1
        for line in self.lines:
            say(line, "ready")

        def start(rank: int, incarnation: int) -> Member:
            self.started.append((rank, incarnation))
            return self.successor if incarnation else pairs[rank][0]

        self.crew = Crew(2, 0, start, goes_on=True, takes_over=True, workers_return=True, has_keeper=True)

    def kill_worker_1(self) -> None:
        self.crew.members[1].process.kill()
        self.lines[1].close()

    def end_the_others(self) -> None:
        for rank in (0, 2):
            say(self.lines[rank], "done", rank=rank)
            self.lines[rank].close()


def test_a_worker_that_is_killed_when_the_keeper_lets_nobody_in_is_not_started_again():
    kept = Kept()

    def see_the_end() -> None:
        say(kept.lines[2], "over")
        kept.crew._listen()
        kept.kill_worker_1()
        kept.end_the_others()

    with kept.successors_line:
        reports = kept.crew.see_through(meanwhile=see_the_end)
    assert kept.started == [(0, 0), (1, 0), (2, 0)]
    assert [bool(report) for report in reports] == [True, False, True]


def test_a_successor_that_is_ready_when_the_keeper_lets_nobody_in_is_ended_without_an_order():
    kept = Kept()

    def listen(event: dict[str, object]) -> None:
        if event.get("state") == "joining":
            say(kept.lines[2], "warning", text="what the keeper said before")
            say(kept.lines[2], "over")
            say(kept.successors_line, "ready")  # and the other worker has not said that it is done
        elif event.get("state") == "waiting":
            pytest.fail("it was told to go")

    kept.crew.on_progress = listen
    kept.successor.process.on_kill = kept.end_the_others
    kept.crew.see_through(meanwhile=kept.kill_worker_1)
    assert kept.started[-1] == (1, 1)
    with kept.successors_line, pytest.raises(EOFError):  # there is nothing to read
        kept.successors_line.recv_bytes()
