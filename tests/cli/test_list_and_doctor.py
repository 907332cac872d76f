"""`shoal list` knows every word; `shoal doctor` survives whatever it examines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from shoal.cli import machine
from shoal.codecs import CODECS
from shoal.core.words import COLLECTIVES, DURABILITY, TRANSPORTS
from shoal.layouts import LAYOUTS
from shoal.loggers.log_option import WORDS as LOGGERS
from shoal.profiling import probe_processes
from shoal.programs.tasks import TASKS
from shoal.search import METHODS
from shoal.strategies import STRATEGIES
from shoal.studies import STUDIES
from shoal.topologies import TOPOLOGIES

WORDS = {
    "strategies": STRATEGIES,
    "topologies": TOPOLOGIES,
    "layouts": LAYOUTS,
    "codecs": CODECS,
    "transports": TRANSPORTS,
    "collectives": COLLECTIVES,
    "durability": DURABILITY,
    "loggers": LOGGERS,
    "tasks": TASKS,
    "methods": METHODS,
    "studies": STUDIES,
}


def test_list_names_every_word_within_80_columns(shoal):
    result = shoal("list")
    assert result.exit_code == 0
    rows = result.stdout.splitlines()
    assert max(map(len, rows)) <= 80
    first_words = {row.split()[0] for row in rows if row.strip()}
    assert first_words >= {*WORDS, *(word for words in WORDS.values() for word in words)}


def test_list_tells_papers_and_options(shoal):
    text = " ".join(shoal("list strategies").stdout.split())
    assert "(Chen & Huo 2016)" in text
    assert "period=50 momentum=auto rate=1.0 nesterov=true" in text
    assert "fp16" not in text


def test_list_for_machines(shoal):
    listed = json.loads(shoal("list --json").stdout)
    assert {kind: [entry["name"] for entry in known] for kind, known in listed.items()} == {
        kind: list(words) for kind, words in WORDS.items()
    }
    bmuf = next(entry for entry in listed["strategies"] if entry["name"] == "bmuf")
    assert bmuf["options"]["period"] == 50 and "Chen & Huo 2016" in bmuf["source"]
    digits = next(entry for entry in listed["tasks"] if entry["name"] == "digits")
    assert digits["options"] == {"batch": 32, "lr": 0.3}
    assert list(json.loads(shoal("list codecs --json").stdout)) == ["codecs"]


@pytest.mark.slow
def test_doctor_finds_that_this_machine_works(shoal, monkeypatch, warm_programs):
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin", prepend=os.pathsep)  # where mpiexec is
    result = shoal("doctor")
    assert result.exit_code == 0, result.stdout
    rows = result.stdout.splitlines()
    assert all(row[0] in "✓–" and row.endswith(".") for row in rows)
    installed = (kind for kind in machine.EXTRAS if machine.lacking(kind) is None)
    for transport in ("processes", "gloo", *installed):
        (row,) = (row for row in rows if f"transport {transport}" in row)
        assert row.startswith("✓") and " us" in row and "B/s" in row


def test_doctor_survives_a_transport_that_aborts(shoal, monkeypatch):
    def abort(rank, folder):
        said = '{"transport": "processes", "round_trip": 0.0001, "bandwidth": 1e9}'
        code = f"import os; print({said!r}, flush=True); os.abort()"
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(machine, "start_probe", abort)
    monkeypatch.setattr(machine, "mpi", lambda: machine.Finding(True, "transport mpi."))
    result = shoal("doctor")
    assert result.exit_code == 1
    assert (
        "✓ transport processes: round trip 100 us, 1.00 GB/s between two processes; cheapest collective for "
        "16 / 64 workers: rabenseifner / rabenseifner for 100 kB, rabenseifner / rabenseifner for 100 MB."
        in result.stdout
    )
    assert (
        "✗ transport gloo does not work here: the process that tested it ended with exit code -6."
        in result.stdout
    )


class Probe:
    """A process whose `communicate` times out after each of these outputs so far, then ends with the last."""

    returncode = 0

    def __init__(self, *outputs):
        self.outputs = list(outputs)

    def communicate(self, timeout=None):
        output = self.outputs.pop(0)
        if self.outputs:
            raise subprocess.TimeoutExpired("probe", timeout, output=output)
        return output.decode(), None

    def kill(self):
        self.returncode = -9


def test_doctor_waits_for_a_probe_that_is_slow_and_not_for_one_that_is_silent():
    slow = Probe(b"started\n", b"started\nprocesses\n", b"started\nprocesses\ngloo\n")
    assert probe_processes._listen(slow) == (
        "started\nprocesses\ngloo\n",
        "the process that tested it ended with exit code 0",
    )
    line = [
        sys.executable,
        "-c",
        "print('{}'); print('no port is free', 9 * '=', sep='\\n'); raise SystemExit(3)",
    ]
    assert probe_processes._listen(probe_processes._start(line))[1] == (
        "the process that tested it ended with exit code 3; its last line: no port is free"
    )
    late = Probe(None, None, None, b"started\n", b"started\nprocesses\n")
    assert probe_processes._listen(late)[0] == "started\nprocesses\n"
    silent = Probe(b"started\n", b"started\n", b"started\n")
    assert probe_processes._listen(silent) == ("started\n", "no answer within 25 s")
    assert silent.returncode == -9
    assert probe_processes._listen(Probe(None, None, None, None, b"")) == ("", "no answer within 100 s")


def test_doctor_says_what_mpi_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.mpi() == machine.Finding(None, "transport mpi needs mpi4py: pip install 'shoal[mpi]'.")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(machine.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = machine.mpi()
    assert finding.works is None and "there is no mpiexec: pip install 'shoal[mpi]'" in finding.sentence


def test_doctor_says_what_grpc_lacks_and_counts_it_as_no_fault(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None if name == "grpc" else name)
    monkeypatch.setattr(machine, "mpi", lambda: machine.Finding(True, "transport mpi."))
    monkeypatch.setattr(machine, "start_probe", lambda rank, folder: None)
    monkeypatch.setattr(machine, "hear", lambda _: ({}, "it was not tried"))
    *_, gloo, grpc, _ = machine.transports()
    assert gloo.works is False
    assert grpc == machine.Finding(None, "transport grpc needs grpcio: pip install 'shoal[grpc]'.")


def test_doctor_finds_mpiexec_beside_python_and_survives_one_that_fails(monkeypatch, tmp_path):
    """As when mpi4py and mpiexec are of different libraries."""
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(machine.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "mpiexec").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "mpiexec").chmod(0o700)
    assert machine.mpi() == machine.Finding(
        False, "transport mpi does not work here: the process that tested it ended with exit code 3."
    )


def test_doctor_says_that_mpi_listens_on_all_addresses(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(machine.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    monkeypatch.setattr(machine, "start_mpi_probe", lambda mpiexec: None)
    monkeypatch.setattr(machine, "hear", lambda _: ({"mpi": {"round_trip": 1e-5, "bandwidth": 1e9}}, ""))
    finding = machine.mpi()
    assert finding.works and "It listens on all addresses of the host" in finding.sentence


def test_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        machine.importlib.metadata, "requires", lambda _: ['mpi4pi>=4; extra == "mpi"', "torch"]
    )
    (finding,) = machine.extras()
    assert finding == machine.Finding(None, "Optional mpi4pi is missing: pip install 'shoal[mpi]'.")


def test_doctor_says_where_data_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, mnist, _ = machine.data_sets()
    assert mnist.works is None and "set SHOAL_DATA to the folder that holds mnist/" in mnist.sentence
    (tmp_path / "mnist").mkdir()
    for file in machine.MNIST.files:
        (tmp_path / "mnist" / file).touch()
    _, mnist, _ = machine.data_sets()
    assert mnist == machine.Finding(True, f"Data of task mnist: found in {tmp_path / 'mnist'}.")
