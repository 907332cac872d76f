"""A volunteer's machine joins a run of another host; the hosts are network namespaces.

The workers of a comparison are stopped until the newcomer is connected, so that it comes while there is
work. Those of a script take their time until there is a file.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from scripts import final_weights
from shoal.studies.shaped_hosts import ShapedHosts, obstacle
from two_hosts import TwoHosts, until

# tests/runs/test_joining.py and tests/api/test_joining_a_loop.py have one who joins on this host
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200), pytest.mark.usefixtures("warm_programs")]

SAMPLES, EPOCHS = 1437, 20
RUN = f"compare --task digits --strategies bmuf -n 2 --max-workers 3 --epochs {EPOCHS} --threads 1"
LOOP = Path(__file__).parents[1] / "api" / "mortal_loop.py"
LOOP_EPOCHS = 100


@pytest.fixture
def two(tmp_path):
    pytest.importorskip("cryptography")
    if (why := obstacle()) is not None:
        pytest.skip(why)
    try:
        with ShapedHosts(2, 12.5e6) as lab:
            yield TwoHosts(lab, tmp_path)
    except RuntimeError as refused:  # root in a container may lack the right
        pytest.skip(str(refused))


def test_a_worker_of_another_host_takes_part_and_every_sample_counts_once(two, tmp_path):
    record, here = tmp_path / "run.json", f"--transport grpc --patience 300 --listen {two.run_host}"
    run = two.start(0, "run", *RUN.split(), *here.split(), "--json", str(record), "--runs", "none")
    join, address, *credentials = two.invitation(run)
    port = address.rpartition(":")[2]
    stopped = two.workers(port)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    joiner = two.start(1, "joiner", join, address, *credentials, "--threads", "1")
    until(lambda: two.connections(port) > 1 or joiner.poll() is not None)  # the launcher's, and the worker's
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert (run.wait(150), joiner.wait(150)) == (0, 0), two.said("run") + two.said("joiner")
    nodes = {node["rank"]: node["samples"] for node in json.loads(record.read_text())["runs"][0]["nodes"]}
    assert nodes.keys() == {0, 1, 2} and min(nodes.values()) > 0
    assert sum(nodes.values()) == EPOCHS * SAMPLES
    assert f"worker 2 joins from {two.guest_host}" in two.said("run")


@pytest.fixture
def visited(two, tmp_path):
    """Two workers of a script that counts its samples, and one of another host that takes part.

    The steps take their time until the file `hurry` is there.
    """
    hurry = tmp_path / "hurry"
    options = f"-n 2 --max-workers 3 --patience 10 --listen {two.run_host} --runs none".split()
    words = [str(LOOP), "--epochs", str(LOOP_EPOCHS), "--hurry", str(hurry)]
    run = two.start(0, "run", "run", *options, *words)
    guest = two.start(1, "guest", *two.invitation(run))
    until(lambda: "goes on from" in two.printed("guest") or guest.poll() is not None)
    assert guest.poll() is None, two.said("guest")
    return run, guest, hurry


def models(printed):
    """The final weights of every worker that printed these lines."""
    return [final_weights(line) for line in re.findall(r"^worker \d \| (weights .*)$", printed, re.MULTILINE)]


def test_a_guest_of_another_host_takes_its_share_of_a_script_s_samples(two, visited):
    run, guest, hurry = visited
    hurry.touch()
    assert (run.wait(150), guest.wait(150)) == (0, 0), two.said("run") + two.said("guest")
    until(lambda: len(models(two.printed("run") + two.printed("guest"))) == 3)
    for model in models(two.printed("run") + two.printed("guest")):
        assert model.unique().tolist() == [float(LOOP_EPOCHS)]
    assert f"worker 2 joins from {two.guest_host}" in two.said("run")
    assert "has left" not in two.said("run")


@pytest.mark.parametrize("how", ["cut", "vanish"])
def test_a_script_s_run_goes_on_without_a_guest_that_is_cut_off_for_ever_and_names_it(two, visited, how):
    run, guest, hurry = visited
    getattr(two, how)()
    until(lambda: "worker 2 has left; its place is open" in two.said("run"))
    hurry.touch()
    assert run.wait(150) == 0, two.said("run")
    until(lambda: len(models(two.printed("run"))) == 2)
    for model in models(two.printed("run")):
        assert model.unique().tolist() == [float(LOOP_EPOCHS)]
    if how == "cut":
        assert guest.wait(100) == 1
        assert "has been away for 30 s; it is over" in two.said("guest")
