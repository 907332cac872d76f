"""Whatever happens to the launcher, no process of a run outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.launch.drive import drive
from shoal.launch.environment import VARIABLE, Place

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
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_launcher(end, tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER.format(folder=str(Path(__file__).parent.parent / "train")))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "going\n"
        assert len(in_session(launcher.pid)) >= 4  # the launcher, two workers, and what forks them
        os.kill(launcher.pid, end)
        deadline = time.monotonic() + 8
        while in_session(launcher.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert in_session(launcher.pid) == set()
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


def test_several_hosts_need_a_named_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="set GLOO_SOCKET_IFNAME"):
        Place.find().open_store()


def test_a_process_started_by_hand_is_alone(monkeypatch):
    for name in (VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Place.find() == Place()


def test_a_coroutine_that_suspends_on_a_real_transport_is_a_bug_and_says_so():
    from shoal.sim.kernel import suspended

    async def waits():
        await suspended()

    with pytest.raises(RuntimeError, match="a verb suspended"):
        drive(waits())
