"""`shoal run`: a script of one's own in real processes, from its first line to whatever end it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from forked import ForkedPython, run_forked
from ports import free_port

pytestmark = pytest.mark.slow
warm = pytest.mark.usefixtures("warm_scripts")

LAUNCH = [sys.executable, "-m", "shoal", "run"]

PREPARE = """
import sys, time
import torch
import shoal

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script that has a model and `step()`."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(PREPARE + text)
        return path

    return write


# three steps, an average that tells that nobody has data any more, and a word about when that was
@warm
@pytest.mark.parametrize(
    ("word", "messages"),
    [("tree", 3 + 1 + 1), pytest.param("auto", 2 * (3 + 1) + 1, marks=pytest.mark.soak)],
)
def test_averages_are_formed_as_the_command_line_says(shoal, script, tmp_path, word, messages):
    path = script("shoal.attach(model, optimizer)\nfor _ in range(3): step()")
    result = shoal(f"run -n 2 --collective {word} --json {tmp_path}/out.json {path}")
    assert result.exit_code == 0, result.stderr
    (record,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert record["config"]["collective"] == word
    compared = 1  # weights at the end: worker 1's sample, and what worker 0 finds
    shown = 1  # worker 1's first gradient, by a fingerprint
    sent = [node["messages_sent"] for node in record["nodes"]]
    assert sent == [messages + compared, messages + compared + shown]


@warm
def test_two_workers_print_with_their_names(shoal, script, tmp_path):
    path = script("""
attachment = shoal.attach(model, optimizer)
for _ in range(3):
    step()
print("told", sys.argv[1:])
print(f"{type(attachment._strategy).__name__} of {attachment.workers}, [bold] stays")
""")
    line = (
        f"run -n 2 --json {tmp_path}/out.json {path} --strategy easgd:rate=0.4 a --strategy.period=2 --data b"
    )
    result = shoal(f"{line} -- --strategy mine")
    assert result.exit_code == 0, result.stderr
    for name in ("worker 0", "worker 1"):
        assert f"{name} | told ['a', '--data', 'b', '--strategy', 'mine']\n" in result.stdout
        assert f"{name} | EASGD of 2, [bold] stays\n" in result.stdout
    (record,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (record["strategy"], record["workers"], record["task"]) == ("easgd", 2, "train.py")
    assert (record["config"]["strategy.period"], record["config"]["strategy.rate"]) == ("2", "0.4")
    assert record["test_accuracy"] is None
    (row,) = (row for row in result.stdout.splitlines() if row.startswith("easgd  "))
    assert row.split()[1:4] == ["2", "–", "–"]


@warm
def test_a_worker_that_raises_is_named_and_ends_the_run(shoal, script, tmp_path):
    path = script("""
attachment = shoal.attach(model, optimizer, "sync")
for t in range(100_000):
    step()
    if t == 5 and attachment.rank == 1:
        with open(sys.argv[0] + ".time", "w") as file:
            file.write(str(time.time()))
        raise RuntimeError("boom")
""")
    result = shoal("run -n 2 --quiet", path)
    seconds = time.time() - float((tmp_path / "train.py.time").read_text())
    assert result.exit_code == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert result.stderr.endswith("shoal: worker 1 failed: RuntimeError: boom\n")
    assert f'File "{path}", line' in result.stderr and "runpy" not in result.stderr
    assert seconds < 10


@pytest.mark.soak
def test_a_worker_that_exits_in_the_midst_is_named(shoal, script, tmp_path, running):
    path = script("""
attachment = shoal.attach(model, optimizer, "sync")
for t in range(100_000):
    step()
    if t == 5 and attachment.rank == 1:
        sys.exit(3)
""")
    result = shoal("run -n 2 --quiet", path)
    assert result.exit_code == 1
    assert result.stderr == "shoal: worker 1 failed: it ended with exit code 3\n"
    assert not running(tmp_path)


@warm
def test_a_script_that_attaches_nothing_is_told_so(shoal, script):
    result = shoal("run", script("print('alone')"))
    assert result.exit_code == 1
    assert result.stdout == "worker 0 | alone\n"
    assert "never called shoal.attach(model, optimizer)" in result.stderr


@pytest.fixture
def torchrun():
    """The variables that torchrun gives to the only process of a run."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**os.environ, **own}


def test_under_torchrun_the_script_runs_in_this_very_process(script, torchrun):
    path = script("""
import os
attachment = shoal.attach(model, optimizer)
step()
codec = attachment.engine.coding.codec
print(type(attachment._strategy).__name__, codec, sys.argv[1:], __name__, os.getpid())
""")
    line = [
        *LAUNCH,
        str(path),
        "--strategy",
        "local",
        "--codec",
        "fp16",
        "--strategy.period",
        "7",
        "--data",
        "x",
    ]
    process = ForkedPython(line, env=torchrun)
    out, err = process.communicate()
    assert (process.wait(), err) == (0, "")
    assert out == f"Local FP16() ['--data', 'x'] __main__ {process.pid}\n"


def test_a_script_whose_end_changes_the_model_by_rounding_alone_is_not_told_so(script, torchrun):
    path = script("""
model = torch.nn.Linear(4, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
shoal.attach(model, optimizer)
step()
""")
    result = run_forked([*LAUNCH, str(path), "--strategy", "local", "--strategy.period", "7"], env=torchrun)
    assert (result.returncode, result.stderr) == (0, "")


def test_under_torchrun_an_exception_shows_where_it_came_from(script, torchrun):
    path = script("shoal.attach(model, optimizer)\nstep()\nraise ValueError('boom')")
    result = run_forked([*LAUNCH, str(path)], env=torchrun)
    assert result.returncode == 1
    assert result.stderr.startswith(f'Traceback (most recent call last):\n  File "{path}", line')
    assert result.stderr.endswith("shoal: worker 0 failed: ValueError: boom\n")


def test_a_journal_where_nobody_would_read_it_is_refused(shoal, script, monkeypatch):
    words = "run --hosts a:1,b:1 --transport gloo --strategy asgd --durability journal"
    refused = shoal(words, script(""))
    assert refused.exit_code == 2
    assert "transport 'gloo' keeps no journal here; take 'grpc'" in refused.stderr
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    refused = shoal("run --transport grpc --strategy asgd --durability journal", script(""))
    assert refused.exit_code == 2
    assert "torchrun started the processes, and does not restart a server that dies" in refused.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--grow-batch 2@10", "a script's loop owns its loader; let its batch_size grow there"),
        ("--crew 2@0,4@500", "start all workers with -n, or let others join with --max-workers"),
        ("--scale-lr auto", "a script makes its own optimizer, and the rate that it sets is"),
        ("--largest-batch 64", "a script's loop owns its loader; let its batch_size grow there"),
        ("--strategy bmuf --strategy.blocks 4", "in a loop of your own, shard deals it out: take period"),
    ],
)
def test_what_only_the_owner_of_the_data_could_do_is_refused_in_a_sentence(shoal, script, options, sentence):
    result = shoal(f"run {options}", script("import shoal"))
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--group 0", "greater than or equal to 1"),
        ("--group 2 --hosts a:1,b:1", "start them with torchrun or srun, and call attach(..., mesh=mesh)"),
        ("--group 2 --strategy asgd --durability journal", "a process that dies ends its group"),
    ],
)
def test_what_groups_of_processes_cannot_do_is_refused_in_a_sentence(shoal, script, options, sentence):
    result = shoal(f"run {options}", script("import shoal"))
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", " ")


def test_under_torchrun_the_mesh_says_what_a_group_is(shoal, script, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = shoal("run --group 2", script(""))
    assert result.exit_code == 2
    assert "torchrun has started this process, and --group starts processes of its own" in result.stderr


@warm
def test_a_group_of_one_gets_torch_s_variables(shoal, script):
    path = script("""
import os
shoal.attach(model, optimizer)
step()
print([os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")])
""")
    assert "worker 1 | ['1', '2', '1']" in shoal("run -n 2 --group 1 --quiet", path).stdout
    assert "worker 1 | [None, None, None]" in shoal("run -n 2 --quiet", path).stdout


def test_under_torchrun_n_must_fit(shoal, script, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = shoal("run -n 3 --strategy easgd", script(""))
    assert result.exit_code == 2
    assert "-n 3 does not fit: the launcher started 3 processes, 1 of them for servers" in result.stderr


STOPPED = """
import os, signal
attachment = shoal.attach(model, optimizer, "sync")
begin = attachment.resumed_from or 0
print("from", begin, flush=True)
for t in range(begin, begin + 5 if begin else 10**9):
    step()
    if t == 5 and attachment.rank == 0:
        os.kill(int(sys.argv[1]) or os.getppid(), signal.SIGINT)
"""


def check_that_it_resumes(shoal, line, folder):
    (step,) = (int(saved.name[5:]) for saved in (folder / "saved").glob("step-*"))
    again = shoal(f"run {line}")
    assert again.exit_code == 0, again.stderr
    assert f"worker 0 | from {step}\n" in again.stdout and f"worker 1 | from {step}\n" in again.stdout


def resuming(folder):
    return (
        f"shoal: stopped by Ctrl-C. The checkpoint is in {folder / 'saved'}; "
        "the same command resumes from it.\n"
    )


@warm
def test_ctrl_c_saves_and_the_same_command_resumes(shoal, script, tmp_path):
    line = f"-n 2 --quiet --checkpoint {tmp_path}/saved {script(STOPPED)} {os.getpid()}"
    stopped = shoal(f"run {line}")
    assert (stopped.exit_code, stopped.stderr) == (130, resuming(tmp_path))
    check_that_it_resumes(shoal, line, tmp_path)


@pytest.mark.soak
def test_ctrl_c_reaches_a_launcher_in_a_process_of_its_own(shoal, script, tmp_path, running):
    line = f"-n 2 --quiet --checkpoint {tmp_path}/saved {script(STOPPED)} 0"
    stopped = subprocess.run([*LAUNCH, *line.split()], capture_output=True, text=True, timeout=110)
    assert (stopped.returncode, stopped.stderr) == (130, resuming(tmp_path))
    assert not running(tmp_path)
    check_that_it_resumes(shoal, line, tmp_path)


SEES = "import os, shoal\nprint('sees', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))\n"


@warm
def test_with_a_device_each_worker_sees_it_alone(shoal, script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = shoal(f"run -n 2 --device cuda {script(SEES)}")
    assert "worker 0 | sees '3'\n" in done.stdout and "worker 1 | sees '4'\n" in done.stdout


def test_a_device_for_workers_elsewhere_is_refused(shoal, script):
    done = shoal(f"run --hosts a:1,b:1 --device cuda {script(SEES)}")
    assert done.exit_code == 2
    assert "--device cuda is for workers on this host" in done.stderr
