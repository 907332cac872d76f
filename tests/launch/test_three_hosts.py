"""Every transport that leaves a host, and a sample of strategies, between three network namespaces."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launched import SCRIPT, Launched, lab_or_skip
from scripts import final_weights, run_loop
from soon import SOON
from ssh_hosts import SshLab

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.soak, pytest.mark.timeout(600)]

RATE = 6.25e6  # bytes a second: 50 Mbit/s
HOSTS = "host0:1,host1:1,host2:1"


@pytest.fixture(scope="module")
def lab() -> Iterator[SshLab]:
    with lab_or_skip(3, RATE) as made:
        yield made


def need(transport: str) -> None:
    """Skip the test, with the reason, unless this transport can be used between hosts."""
    for package in ("grpc", "cryptography") if transport == "grpc" else ():
        pytest.importorskip(package, reason=f"needs {package}: pip install 'shoal[hosts]'")


def options_of(strategy: str) -> list[str]:
    return [
        word for name, value in SOON.get(strategy, {}).items() for word in (f"--strategy.{name}", str(value))
    ]


@pytest.mark.parametrize(
    ("transport", "strategy"),
    [
        *(
            ("grpc", word)
            for word in ("sync", "diloco", "dpsgd", "downpour", "easgd", "gossip", "sync_server")
        ),
        *(("gloo", word) for word in ("bmuf", "downpour", "sgp", "adpsgd")),
    ],
)
def test_a_strategy_learns_between_three_hosts(lab, transport, strategy):
    need(transport)
    words = ["--strategy", strategy, *options_of(strategy), "--transport", transport]
    with Launched(lab, HOSTS, *words, arguments=("--epochs", "6")) as run:
        assert run.finish() == 0, run.errors
    for rank in range(3):
        assert "fell True" in run.of(f"worker {rank}"), run.printed


@pytest.mark.parametrize("strategy", ["sync", "dpsgd"])
def test_three_hosts_give_the_bits_of_one(lab, strategy):
    need("grpc")
    with Launched(lab, HOSTS, "--strategy", strategy) as run:
        assert run.finish() == 0, run.errors
    one_host = run_loop(workers=3, strategy=strategy, script=SCRIPT)
    for rank in range(3):
        assert final_weights(run.of(f"worker {rank}")).equal(final_weights(one_host[rank]))


MPI_SSH = """#!/bin/sh
exec ssh -F {folder}/ssh_config -o User=root -o IdentityFile={folder}/user_key \\
    -o UserKnownHostsFile={folder}/known_hosts -o BatchMode=yes "$@"
"""


@pytest.mark.parametrize("strategy", ["sync", "downpour"])
def test_mpi_reaches_across_hosts(lab, strategy):
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'shoal[mpi]'")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        pytest.skip("there is no mpiexec: pip install mpich")
    ssh = lab.folder / "mpi_ssh"
    ssh.write_text(MPI_SSH.format(folder=lab.folder))
    ssh.chmod(0o755)
    ranks = 3 + (strategy == "downpour")
    addresses = ",".join(lab.address(number) for number in range(3))
    command = [mpiexec, "-launcher", "ssh", "-launcher-exec", str(ssh), "-localhost", lab.address(3)]
    command += ["-hosts", addresses, "-iface", "eth0", "-n", str(ranks), "-l"]
    command += ["-genv", "FI_PROVIDER", "tcp", "-genv", "FI_TCP_IFACE", "eth0"]
    command += [str(lab.python), "-m", "shoal", "run", "--strategy", strategy, str(SCRIPT)]
    with Launched(lab, HOSTS, command=command) as run:
        assert run.finish() == 0, run.printed + run.errors
    assert run.printed.count("fell True") == 3
