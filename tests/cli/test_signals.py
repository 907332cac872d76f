"""Ctrl-C, SIGTERM, SIGHUP and SIGQUIT end a command soon, with its checkpoint, and leave nothing behind.

On a quiet machine all have ended within five seconds. A server once kept a stopped run for 60 s more.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from under_way import UnderWay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SOON = 25.0  # seconds, on a busy machine

LOOP = """
import os, sys, time
import torch
import shoal

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attachment = shoal.attach(model, optimizer)
steps = int(sys.argv[1])
for t in range(steps):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + attachment.rank)).pow(2).mean().backward()
    optimizer.step()
    if t == 5:
        print("goes", os.getpid(), flush=True)
    time.sleep(0.01)
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at /proc")


def soaks(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture
def loop(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_under_run_with_a_server_does_not_wait_for_workers_that_have_stopped(shoal, tmp_path, saves):
    path = tmp_path / "train.py"
    ctrl_c = f"attachment.rank == 0 and (print(time.monotonic()), os.kill({os.getpid()}, 2))"
    path.write_text(LOOP.replace('print("goes", os.getpid(), flush=True)', ctrl_c))
    option = f"--checkpoint {tmp_path}/saved " if saves else ""
    stopped = shoal(f"run -n 2 --strategy asgd --quiet {option}{path} 100000")
    assert time.monotonic() - float(stopped.stdout.removeprefix("worker 0 | ")) < SOON
    assert stopped.exit_code == 130, stopped.stderr
    assert len(list(tmp_path.glob("saved/step-*/*.json"))) == (3 if saves else 0)


def to_all(run: UnderWay, number: int) -> None:
    """As a service manager does."""
    for pid in run.processes():
        os.kill(pid, number)


def to_group(run: UnderWay, number: int) -> None:
    """As a terminal or `timeout` does."""
    os.killpg(run.process.pid, number)


@needs_proc
@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGTERM, to_all),
        soaks(signal.SIGTERM, to_group),
        soaks(signal.SIGINT, to_group),
        soaks(signal.SIGHUP, to_group),
        soaks(signal.SIGQUIT, to_group),
    ],
)
def test_a_signal_to_all_of_a_comparison_keeps_the_checkpoint_and_leaves_no_journal_and_no_process(
    tmp_path, number, send
):
    line = "compare --strategies asgd -n 2 --epochs 5000 --checkpoint saved --every 20 --durability journal"
    with UnderWay(tmp_path, f"{line} --quiet") as run:
        run.await_that(lambda: list(tmp_path.glob("saved/asgd/step-*/worker-0.json")))
        send(run, number)
        assert run.end(SOON) == 128 + number, run.printed
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        assert run.printed == (
            f"shoal: stopped by {name}. The checkpoint is in saved/asgd; the same command resumes from it.\n"
        )
        assert run.left() == []
    last = max(tmp_path.glob("saved/asgd/step-*"))
    assert sorted(path.stem for path in last.glob("*.json")) == ["server-0", "worker-0", "worker-1"]


@needs_proc
@pytest.mark.soak  # every process imports torch
@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGHUP, to_group),
        (signal.SIGQUIT, to_group),
        (signal.SIGTERM, to_all),
        (signal.SIGINT, to_group),
    ],
)
def test_a_signal_to_a_script_s_run_leaves_no_journal_and_no_process(loop, tmp_path, number, send):
    line = "run -n 2 --strategy asgd --durability journal --checkpoint saved --quiet loop.py 100000"
    with UnderWay(tmp_path, line) as run:
        run.await_line("goes")
        send(run, number)
        assert run.end(SOON) == 128 + number, run.printed
        assert "The checkpoint is in saved; the same command resumes from it." in run.printed
        assert run.left() == []
    assert len(list(tmp_path.glob("saved/step-*/*.json"))) == 3


@needs_proc
@pytest.mark.soak
def test_sigterm_to_a_single_worker_ends_that_worker(loop, tmp_path):
    with UnderWay(tmp_path, "run -n 2 --strategy asgd --quiet loop.py 1500") as run:
        run.await_line("worker 1 | goes")
        found = re.search(r"worker 1 \| goes (\d+)", run.printed)
        assert found is not None
        os.kill(int(found[1]), signal.SIGTERM)
        run.await_line("worker 1 was ended by SIGTERM; the other 1 go on")
        assert run.end(120) == 0, run.printed


IMPORTS = """
import os, time
print("importing", flush=True)
try:
    for _ in range(1000):
        time.sleep(0.1)  # a signal on the way into sleep() is handled when sleep() comes back
except BaseException:
    raise ImportError("half imported")  # as a library in C may do
"""


@pytest.mark.parametrize("module", ["typer", "torch"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported_ends_in_a_sentence(tmp_path, module, number):
    (tmp_path / f"{module}.py").write_text(IMPORTS)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2] / "src")))
    with UnderWay(tmp_path, "compare --strategies sync", {"PYTHONPATH": path}) as run:
        run.await_line("importing")
        run.process.send_signal(number)
        assert run.end(SOON) == 128 + number
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert run.printed == f"importing\nshoal: stopped by {name}\n"
