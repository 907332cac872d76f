"""The agent and the launcher's link to it, without ssh: the agent is a child of the test."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from proc_secrets import read_all, secrets_of
from scripts import final_weights
from shoal.api.script import run_script
from shoal.core.errors import Unavailable, WorkerFailed
from shoal.launch import agent as agent_module
from shoal.launch.agent_call import explain, ssh_command, start_command
from shoal.launch.environment import Place
from shoal.launch.fleet import Fleet
from shoal.launch.hosts import HostList, parse_hosts
from shoal.strategies import STRATEGIES

pytest.importorskip("grpc", reason="needs grpcio: pip install 'shoal[grpc]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'shoal[hosts]'")

SH = (sys.executable, "-c", "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[-1]])")
"""An `ssh` that knows this host alone."""

LOOP = Path(__file__).parents[1] / "api" / "loop.py"
TRAINS = Path(__file__).parents[1] / "support" / "hosts_loop.py"


@pytest.fixture(autouse=True)
def this_shoal(monkeypatch, warm_programs):
    """The agents find the Shoal under test, whatever is installed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(agent_module.__file__).parents[2]))


def here(workers: int, **options) -> HostList:
    return HostList(parse_hosts(f"here=127.0.0.1:{workers}"), ssh=options.pop("ssh", SH), **options)


def run(
    hosts: HostList, *arguments: str, strategy: str, script: Path = LOOP, on_output=None, **place
) -> dict[str, list[str]]:
    """What each node printed."""
    lines: dict[str, list[str]] = {}

    def keep(name: str, line: str) -> None:
        lines.setdefault(name, []).append(line)

    run_script(
        script,
        arguments,
        workers=hosts.workers,
        strategy=STRATEGIES.make(strategy),
        place=Place(strategy=strategy, transport=place.pop("transport", "grpc"), **place),
        on_progress=lambda event: None,
        on_output=on_output or keep,
        hosts=hosts,
    )
    return lines


@pytest.mark.slow
def test_nodes_of_an_agent_train_over_tls_and_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = run(here(2), "--steps", "5", strategy="sync")
    weights = [final_weights("\n".join(said[f"worker {rank}"])) for rank in range(2)]
    assert weights[0].equal(weights[1])
    assert not list(tmp_path.glob("shoal-*"))


@pytest.mark.slow
def test_no_secret_of_a_run_shows_in_command_lines_or_variables():
    secrets, shown = [], []

    def look(name: str, line: str) -> None:
        if (name, line) == ("worker 0", "trains"):
            pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
            secrets.extend(held for pid in pids if "token_file" in (held := secrets_of(pid)))
            shown.extend(read_all("cmdline") + read_all("environ"))

    run(here(1), "--epochs", "2", strategy="sync", script=TRAINS, on_output=look)
    tokens = {held["token_file"] for held in secrets}
    assert tokens and all(len(token) == 64 for token in tokens)
    assert shown and not any(token.encode() in b"".join(shown) for token in tokens)
    assert not any(b"PRIVATE KEY" in text for text in shown)


@pytest.mark.slow
def test_a_script_s_exception_is_the_launcher_s_with_its_traceback():
    with pytest.raises(
        WorkerFailed, match=r"worker 1 on here failed: RuntimeError: the cat walked"
    ) as failed:
        run(here(2), "--raise-at", "1", "3", strategy="sync", transport="gloo")
    assert "loop.py" in failed.value.details and "script_process" not in failed.value.details


@pytest.mark.slow
def test_an_exit_code_travels():
    with pytest.raises(WorkerFailed, match="worker 0 on here failed: it ended with exit code 7"):
        run(here(1), "--leave-at", "0", "3", strategy="single")


@pytest.mark.slow
def test_a_run_with_a_server_goes_on_without_a_host_whose_agent_is_killed(caplog):
    agents, said = [], []

    def started(host, command):
        agents.append(start_command(command))
        return agents[-1]

    def kill_the_second_agent(name: str, line: str) -> None:
        said.append((name, line))
        if (name, line) == ("worker 1", "trains"):
            os.killpg(agents[1].pid, signal.SIGKILL)  # each has a session of its own

    two = HostList(parse_hosts("here=127.0.0.1:1,there=127.0.0.2:1"), ssh=SH, start=started)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        run(two, "--pause", "0.05", strategy="asgd", script=TRAINS, on_output=kill_the_second_agent)
    assert "worker 1 on there was lost with host 'there'" in caplog.text
    ended = [name for name, line in said if line.startswith("weights ")]
    assert ended == ["worker 0"]


class Told:
    """A link to a host that notes what it is told to do."""

    def __init__(self):
        self.orders = []

    def send(self, **order):
        self.orders.append(order)


def test_hosts_are_told_once_which_steps_to_forget():
    fleet, link = Fleet(here(2), 2, "gloo", print), Told()
    fleet._links = [link]
    for step in (10, 20, 30):
        for rank in (0, 1, 1):  # one of them tells it twice
            fleet._note_saved(rank, step)
    assert link.orders == [{"do": "forget", "before": step} for step in (10, 20)]


def connect(hosts: HostList) -> None:
    with Fleet(hosts, hosts.workers, "gloo", lambda name, line: None):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"python": "/no/such/python"}, "there is no such Python .*--remote-python"),
        ({"python": "/usr/bin/false"}, "the agent ended with exit code 1 and said: nothing"),
        ({"ssh": ("no-such-ssh",)}, "needs the program 'no-such-ssh'"),
    ],
)
def test_a_host_without_an_agent_is_refused_in_one_sentence(options, sentence):
    with pytest.raises(Unavailable, match=sentence) as refused:
        connect(here(1, **options))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_another_shoal_is_refused(monkeypatch):
    monkeypatch.setattr("shoal.launch.host_link.version", lambda: "9.9, code 00000000")
    with pytest.raises(Unavailable, match=r"has another Shoal \(.*\) than this one \(9.9, code 00000000\)"):
        connect(here(1))


@pytest.mark.slow
def test_another_script_and_a_missing_one_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    place = {"transport": "gloo"}
    with Fleet(here(1, folder=str(tmp_path / "there")), 1, "gloo", print) as fleet:
        with pytest.raises(Unavailable, match=r"there is no script 'train.py' in .*there"):
            fleet.prepare("train.py", [], place)
        (tmp_path / "there" / "train.py").write_text("print(2)")
        with pytest.raises(Unavailable, match=r"train.py in .*there is not the same as the launcher's"):
            fleet.prepare("train.py", [], place)
    elsewhere = Fleet(here(1, folder="/no/such/folder"), 1, "gloo", print)
    refusal = pytest.raises(Unavailable, match=r"it has no folder /no/such/folder .*--remote-folder")
    with elsewhere as fleet, refusal:
        fleet.prepare("train.py", [], place)


@pytest.mark.slow
def test_what_a_shell_prints_at_its_start_does_no_harm():
    noisy = (
        sys.executable,
        "-c",
        "import os, sys; os.execvp('sh', ['sh', '-c', 'echo hi; ' + sys.argv[-1]])",
    )
    connect(here(1, ssh=noisy))


@pytest.mark.slow
def test_an_agent_whose_launcher_is_silent_ends_itself():
    quick = "from shoal.launch import agent; agent.Watchdog.__init__.__defaults__ = (0.1,); agent.main()"
    with subprocess.Popen(
        [sys.executable, "-c", quick], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
    ) as run:
        assert run.wait(60) == 1
        assert run.stderr is not None and "the launcher was silent for 0.1 s" in run.stderr.read()


def test_ssh_asks_nothing_and_the_user_s_options_come_first():
    command = ssh_command(["ssh", "-F", "f"], "me@b", "/a python", patience=45.0)
    assert command[:3] == ["ssh", "-F", "f"]
    assert command[-3:] == ["--", "me@b", "exec '/a python' -m shoal.launch.agent"]
    assert "BatchMode=yes" in command
    assert {"ServerAliveInterval=10", "ServerAliveCountMax=5"} <= {*command}


@pytest.mark.parametrize(
    ("code", "said", "sentence"),
    [
        (255, ["Host key verification failed."], "does not know its host key.*: ssh b"),
        (255, ["me@b: Permission denied (publickey)."], "without a password; set up a key: ssh-copy-id b"),
        (255, ["ssh: connect to host b port 22: No route to host"], "cannot reach it: .*No route to host"),
        (127, ["sh: 1: exec: /x/python: not found"], "no such Python"),
        (1, ["/x/python: No module named shoal"], "has no shoal .*--remote-python"),
        (1, ["Error while finding module specification … No module named 'shoal'"], "has no shoal"),
        (3, [], "exit code 3 and said: nothing"),
    ],
)
def test_ssh_s_complaints_become_advice(code, said, sentence):
    assert re.search(sentence, explain(code, said, "b"))
