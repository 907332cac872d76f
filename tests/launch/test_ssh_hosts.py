"""`shoal run --hosts` over a real sshd: two hosts in network namespaces, with a link of 100 Mbit/s each."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launched import SCRIPT, SECONDS, Launched, lab_or_skip
from proc_secrets import read_all, secrets_of
from scripts import final_weights, run_loop
from shoal.studies.shaped_hosts import INTERFACE, ip
from ssh_hosts import SshLab

pytest.importorskip("grpc", reason="needs grpcio: pip install 'shoal[grpc]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'shoal[hosts]'")

# test_host_link.py has agents, a killed one and secrets without ssh; here every host imports torch
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

RATE = 12.5e6  # bytes a second


@pytest.fixture(scope="module")
def lab() -> Iterator[SshLab]:
    with lab_or_skip(2, RATE) as made:
        yield made


def launched(lab: SshLab, *options: str, arguments: tuple[str, ...] = (), hosts: str = "") -> Launched:
    """`shoal run --hosts`, on two workers of each host unless told otherwise."""
    return Launched(lab, hosts or "host0:2,host1:2", *options, arguments=arguments)


def nodes_on(lab: SshLab, host: int) -> list[str]:
    """The Shoal processes on a host."""
    listed = lab.on_host(host, "ps -eo args").splitlines()
    return [line for line in listed if "-m shoal." in line and "ps -eo" not in line]


def await_nothing_left(lab: SshLab) -> None:
    deadline = time.monotonic() + SECONDS
    while left := nodes_on(lab, 0) + nodes_on(lab, 1):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def left_in_folders(lab: SshLab) -> str:
    """What runs have left in the temporary folders of the hosts."""
    return "".join(lab.on_host(host, f"ls -d {lab.private}/shoal-*") for host in (0, 1))


def agents_secrets(lab: SshLab, host: int, nodes: int) -> dict[str, str]:
    """The secrets of a run, as the workers, the agent and perhaps the keeper of a host hold them."""
    held = [secrets for pid in lab.pids(host) if (secrets := secrets_of(pid))]
    assert len(held) == nodes + 1 and all(secrets == held[0] for secrets in held)
    return held[0]


@pytest.mark.usefixtures("warm_programs", "warm_scripts")  # for the launcher, and the run on one host
def test_bmuf_is_bit_equal_to_one_host_and_its_secrets_stay_secret(lab):
    options = ("--strategy", "bmuf", "--strategy.period", "4", "--watch")
    short, slow = ("--epochs", "2"), ("--pause", "0.2")
    with launched(lab, *options, arguments=(*short, *slow), hosts="host0:1,host1:1") as run:
        run.await_line("trains", times=2)
        await_news_of(2, lab, run)
        first, second = (agents_secrets(lab, host, nodes) for host, nodes in ((0, 2), (1, 1)))
        token = first["token_file"]
        assert token == second["token_file"] and len(token) == 64 and first["key"] != second["key"]
        shown = b"".join(read_all("cmdline") + read_all("environ"))
        assert token.encode() not in shown and b"PRIVATE KEY" not in shown
        for host in (0, 1):
            assert not lab.on_host(host, f"grep -rl 'PRIVATE KEY' {lab.private} /run /dev/shm")
        assert run.finish() == 0, run.errors
    assert not left_in_folders(lab)
    assert not nodes_on(lab, 0) + nodes_on(lab, 1)
    period = {"period": "4"}
    one_host = run_loop(
        *short, workers=2, strategy="bmuf", strategy_options=period, script=SCRIPT, transport="processes"
    )
    assert final_weights(run.of("worker 1")).equal(final_weights(one_host[1]))
    assert final_weights(run.of("worker 0")).equal(final_weights(one_host[0]))


def await_news_of(workers: int, lab: SshLab, run: Launched) -> None:
    """Return when the live page has news of the workers of both hosts. It is read where the command runs."""
    address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", run.errors)
    assert address is not None, run.errors
    code = (
        f"import urllib.request as u; s = u.urlopen('{address[0]}events'); print(s.readline(), s.readline())"
    )
    deadline = time.monotonic() + SECONDS
    while True:
        page, _ = lab.call([sys.executable, "-c", code], lab.folder / "page.log").communicate(timeout=SECONDS)
        states = re.findall(r'\["(\w+)",\d+', page)
        if len(states) >= workers and "joining" not in states[-workers:]:
            return
        assert time.monotonic() < deadline, page


@pytest.mark.parametrize("strategy", ["asgd", "sync"])
def test_a_host_whose_agent_is_killed_takes_part_again_and_nothing_is_left_on_either(lab, tmp_path, strategy):
    options = ("--strategy", strategy, "--json", str(tmp_path / "result.json"))
    pause = ("--pause", "0.3", "--epochs", "6")
    with launched(lab, *options, arguments=pause, hosts="host0:1,host1:1") as run:
        run.await_line("trains", times=2)
        lab.on_host(1, "pkill -KILL -f '^[^ ]*python[^ ]* -m shoal.launch.agent'")
        run.await_line("host1 \\| answers again")
        assert run.finish() == 0, run.errors
    assert re.search(
        r"worker 1 on host1 was lost with host 'host1' \(.*\); the other 1 go on, and it is", run.errors
    )
    assert re.search(r"resumed from [1-9]", run.of("worker 1"))
    assert final_weights(run.of("worker 0")).equal(final_weights(run.of("worker 1")))
    await_nothing_left(lab)
    (record,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert record["config"]["hosts"] == "host0:1,host1:1" and record["config"]["transport"] == "grpc"


@pytest.mark.parametrize("strategy", ["asgd", "sync"])
def test_a_host_that_was_cut_off_for_longer_than_the_patience_takes_part_again(lab, strategy):
    options = ("--strategy", strategy, "--patience", "10")
    with launched(
        lab, *options, arguments=("--pause", "0.3", "--epochs", "8"), hosts="host0:1,host1:1"
    ) as run:
        run.await_line("trains", times=2)
        ip("-n", lab._host(1), "link", "set", INTERFACE, "down")
        run.await_line("not responding")  # ssh gives up
        time.sleep(5)
        ip("-n", lab._host(1), "link", "set", INTERFACE, "up")
        run.await_line("host1 \\| answers again")
        assert run.finish() == 0, run.errors
    assert re.search(r"resumed from [1-9]", run.of("worker 1"))
    assert final_weights(run.of("worker 0")).equal(final_weights(run.of("worker 1")))
    await_nothing_left(lab)


def test_a_killed_worker_and_a_killed_server_do_not_end_the_run(lab):
    options = ("--strategy", "asgd", "--durability", "journal", "--servers-on", "host1")
    with launched(lab, *options, arguments=("--pause", "0.3", "--epochs", "10")) as run:
        run.await_line("trains", times=4)
        lab.on_host(0, f"kill -KILL {run.pid('worker 1')}")
        lab.on_host(1, f"kill -KILL {server_pid(lab, run)}")
        assert run.finish() == 0, run.errors
    assert "worker 1 on host0 was ended by SIGKILL; the other 3 go on, and it is started again" in run.errors
    assert "the server on host1 was ended by SIGKILL; it is started again" in run.errors
    assert "fell True" in run.of("worker 3")


def server_pid(lab: SshLab, run: Launched) -> int:
    """The script's process on host 1 that is no worker: a server prints nothing."""
    listed = lab.on_host(1, "ps -eo pid,args").splitlines()
    nodes = {int(line.split()[0]) for line in listed if "-m shoal.api.script" in line}
    (server,) = nodes - {run.pid("worker 2"), run.pid("worker 3")}
    return server


def test_ctrl_c_saves_on_each_host_and_the_same_command_resumes_to_the_same_bits(lab):
    folder = lab.private / "ckpt"
    options = ("--strategy", "bmuf", "--strategy.period", "4", "--checkpoint", str(folder), "--every", "2")
    with launched(lab, *options, arguments=("--pause", "0.5", "--epochs", "6")) as run:
        run.await_line("trains", times=4)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130
    assert f"The checkpoint is in {folder} on every host; the same command resumes from it" in run.errors
    files = [lab.on_host(host, f"cd {folder} && find . -name '*.json' | sort").split() for host in (0, 1)]
    assert {Path(name).name for name in files[0]} == {"worker-0.json", "worker-1.json"}
    assert {Path(name).name for name in files[1]} == {"worker-2.json", "worker-3.json"}
    assert not folder.exists()  # not on this host
    with launched(lab, *options, arguments=("--epochs", "6")) as again:
        assert again.finish() == 0, again.errors
    assert re.search(r"resumed from [1-9]", again.of("worker 2"))
    for host in (0, 1):
        assert len(lab.on_host(host, f"ls {folder}").split()) <= 4  # old steps are removed on both
    whole = run_loop(
        "--epochs", "6", workers=4, strategy="bmuf", strategy_options={"period": "4"}, script=SCRIPT
    )
    assert final_weights(again.of("worker 3")).equal(final_weights(whole[3]))


def test_no_node_outlives_a_killed_launcher(lab):
    before = left_in_folders(lab)
    with launched(lab, "--strategy", "bmuf", arguments=("--pause", "0.2", "--epochs", "600")) as run:
        run.await_line("trains", times=4)
        assert len(nodes_on(lab, 1)) >= 3
        os.kill(run.process.pid, signal.SIGKILL)
        await_nothing_left(lab)
        assert left_in_folders(lab) == before


def test_gloo_reaches_across_hosts_too(lab):
    with launched(lab, "--strategy", "sync", "--transport", "gloo") as run:
        assert run.finish() == 0, run.errors
    one_host = run_loop(workers=4, strategy="sync", script=SCRIPT, transport="gloo")
    assert final_weights(run.of("worker 3")).allclose(final_weights(one_host[3]), atol=1e-6)


def test_a_stranger_s_certificate_and_a_stranger_s_token_are_refused(lab, tmp_path):
    from shoal.launch.certificates import CertificateAuthority

    stranger = CertificateAuthority()
    certificate, key = stranger.issue(lab.address(2))
    for name, text in (("authority", stranger.certificate), ("certificate", certificate), ("key", key)):
        (tmp_path / name).write_text(text)
    admitted = tmp_path / "admitted"
    admitted.mkdir()
    with launched(
        lab, "--strategy", "sync", "--port", "50777", arguments=("--pause", "0.2", "--epochs", "60")
    ) as run:
        run.await_line("trains", times=4)
        for name, text in agents_secrets(lab, 1, 2).items():
            (admitted / name).write_text(text)
        assert (
            call_hub(lab, admitted, admitted, right_token=True) == "FAILED_PRECONDITION"
        )  # read, then refused
        assert call_hub(lab, admitted, admitted, right_token=False) == "UNAUTHENTICATED"
        assert call_hub(lab, tmp_path, admitted, right_token=True) == "UNAVAILABLE"  # no handshake
        assert call_hub(lab, admitted, tmp_path, right_token=True) == "UNAVAILABLE"


CALL = """
import sys
from pathlib import Path
import grpc
authority, own, token, address = sys.argv[1:]
pair = (Path(own, "key").read_bytes(), Path(own, "certificate").read_bytes())
credentials = grpc.ssl_channel_credentials(Path(authority, "authority").read_bytes(), *pair)
call = grpc.secure_channel(address, credentials).unary_unary("/shoal.Hub/Join")
try:
    call(b"", timeout=30, metadata=(("authorization", f"Bearer {token}"),))
except grpc.RpcError as error:
    print(error.code().name)
"""


def call_hub(lab: SshLab, authority: Path, own: Path, *, right_token: bool) -> str:
    """The status that worker 0 answers a call from another host with."""
    token = agents_secrets(lab, 0, 3)["token_file"] if right_token else "0" * 64
    words = [sys.executable, "-c", CALL, str(authority), str(own), token, f"{lab.address(0)}:50777"]
    process = lab.call(words, lab.folder / "call.log")
    out, _ = process.communicate(timeout=SECONDS)
    return out.strip()


@pytest.mark.parametrize(
    ("hosts", "sentence"),
    [
        ("host0:1,host9=10.77.0.9:1", "host 'host9': ssh cannot reach it: "),
        ("host0:1,10.77.0.2:1", "host '10.77.0.2': ssh does not know its host key"),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_named(lab, hosts, sentence):
    with launched(lab, "--strategy", "sync", hosts=hosts) as run:
        assert run.finish() == 1
    assert sentence in run.errors and run.errors.count("\n") == 1
    assert not nodes_on(lab, 0)


def test_the_lab_s_daemons_are_ours(lab):
    """Each host has its own processes: it sees the sshd and nothing of this machine."""
    listed = lab.on_host(0, "ps -eo args").splitlines()
    assert len(listed) < 10 and any("sshd" in line for line in listed)
