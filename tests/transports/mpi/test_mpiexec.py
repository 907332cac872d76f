"""What mpiexec starts is joined; a rank that fails ends the job; nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from mpi_ranks import PATIENCE, needs_mpi, run_job, started
from typer.testing import CliRunner

import shoal
from shoal.cli import app
from shoal.launch.environment import MPIEXEC, TORCHRUN, VARIABLE, Place

TRAIN = Path(__file__).parents[2] / "api"
LOOP, OWN_LOOP = TRAIN / "loop.py", TRAIN / "own_loop.py"
SHOAL = ("-m", "shoal", "run")

WAITS = """
import os, sys, time
import torch
import shoal

rank = int(os.environ["PMI_RANK"])
if "early" in sys.argv and rank == 1:
    raise RuntimeError("before the others could know of it")
torch.manual_seed(rank)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shoal.attach(model, optimizer, "sync")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
sys.stdout.write(f"weights {model.weight.detach().numpy().tobytes().hex()}\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, *TORCHRUN, *(name for names in MPIEXEC for name in names)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """A copy of its own, so that nobody else runs it."""
    return Path(shutil.copy(LOOP, tmp_path))


@pytest.fixture
def waits(tmp_path: Path) -> Path:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    return script


def all_gone(script: Path) -> bool:
    """Whether no process runs the script any more; one that was killed may take a moment."""
    deadline = time.monotonic() + 5.0
    while ranks_of(script) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not ranks_of(script)


def ranks_of(script: Path) -> list[Path]:
    """Where the system lists the processes that run a script."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(script).encode() in (process / "cmdline").read_bytes():
                found.append(process)
    return found


def shared_by(script: Path) -> set[Path]:
    """The shared memory of MPICH that processes which run the script have mapped."""
    maps = "".join((process / "maps").read_text() for process in ranks_of(script))
    return set(map(Path, re.findall(r"/dev/shm/mpich_\w+", maps)))


def printed(output: str) -> list[str]:
    """The weights that the ranks print."""
    return re.findall(r"^weights ([0-9a-f]+)$", output, re.MULTILINE)


# Finding one's place


@pytest.mark.parametrize("names", MPIEXEC, ids=["MPICH", "Open MPI"])
def test_the_variables_of_mpiexec_are_read(
    names: tuple[str, str], no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(names, ("2", "5"), strict=True):
        monkeypatch.setenv(name, value)
    place = Place.find()
    assert (place.rank, place.nodes, place.launched, place.transport) == (2, 5, "mpi", "mpi")
    assert place.is_joined and place.open_store() is None


def test_a_lone_rank_is_as_if_started_by_hand(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    assert Place.find() == Place()


def test_torchrun_and_shoal_come_first(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "2", "PMI_SIZE": "5", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "x")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert Place.find().launched == "torchrun"
    monkeypatch.setenv(VARIABLE, Place(3, 4, launched="shoal").to_environment()[VARIABLE])
    assert Place.find() == Place(3, 4, launched="shoal")


def test_without_mpiexec_it_says_how_to_start(no_launcher: None) -> None:
    with pytest.raises(ValueError, match=r"start it with: mpiexec -n 4 shoal run train\.py"):
        shoal.run("digits", transport="mpi")
    result = CliRunner().invoke(app, ["run", "--transport", "mpi", str(LOOP)])
    assert result.exit_code == 2
    assert "joins the processes that mpiexec has started" in result.stderr


def test_under_mpiexec_n_must_fit(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    result = CliRunner().invoke(app, ["run", "-n", "3", "--strategy", "easgd", str(LOOP)])
    assert result.exit_code == 2
    assert "-n 3 does not fit: the launcher started 3 processes, 1 of them for servers" in result.stderr


# Training


@needs_mpi
@pytest.mark.soak
def test_three_ranks_of_a_plain_script_end_alike() -> None:
    result = run_job(3, LOOP, "--strategy-in-code", "sync")
    assert (result.returncode, result.stderr) == (0, "")
    weights = printed(result.stdout)
    assert len(weights) == 3 and len(set(weights)) == 1  # to the last bit


@needs_mpi
@pytest.mark.soak
def test_the_last_rank_of_a_plain_script_is_the_server() -> None:
    result = run_job(3, LOOP, "--strategy-in-code", "downpour")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(printed(result.stdout)) == 2


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("hogwild", 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("hogwild", 3), ("downpour", 5))),
    ],
)
def test_shoal_run_joins(strategy: str, ranks: int) -> None:
    """Hogwild goes through a window of the server's."""
    result = run_job(ranks, *SHOAL, "--strategy", strategy, OWN_LOOP, "--epochs", "2", warm=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    steps = 2 * 12 // (ranks - 1)  # 96 samples in batches of 8
    assert lines.count(f"steps {steps}") == ranks - 1
    assert len([line for line in lines if line.startswith("weights ")]) == ranks - 1


# Failing


@needs_mpi
@pytest.mark.soak
def test_a_rank_that_raises_is_named_and_ends_the_job(loop: Path) -> None:
    result = run_job(2, *SHOAL, "--strategy", "sync", loop, "--steps", "1000000", "--raise-at", "1", "5")
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "shoal: worker 1 failed: RuntimeError: the cat walked over the keyboard\n" in result.stderr
    assert all_gone(loop)


@needs_mpi
@pytest.mark.soak
def test_a_plain_rank_that_raises_ends_the_job(loop: Path) -> None:
    result = run_job(2, loop, "--steps", "1000000", "--raise-at", "1", "5")
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: the cat walked over the keyboard\n" in result.stderr
    assert all_gone(loop)


@needs_mpi
@pytest.mark.soak
def test_a_rank_that_vanishes_ends_the_job(loop: Path) -> None:
    result = run_job(2, loop, "--steps", "1000000", "--leave-at", "1", "5")
    assert result.returncode == 7
    assert all_gone(loop)


@needs_mpi
@pytest.mark.slow
@pytest.mark.soak
def test_a_rank_that_fails_before_it_attaches_ends_the_job(waits: Path) -> None:
    result = run_job(2, *SHOAL, waits, "early")
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "shoal: worker 1 failed: RuntimeError: before the others could know of it\n" in result.stderr
    assert all_gone(waits)


@needs_mpi
@pytest.mark.slow
@pytest.mark.soak
def test_nobody_waits_for_ever_for_a_rank_that_ended_before_mpi_was_started() -> None:
    code = (
        "from shoal.launch.join import start_mpi\nimport os\nif os.environ['PMI_RANK'] == '0': start_mpi(1.0)"
    )
    result = run_job(2, "-c", code)
    assert result.returncode == 1
    assert result.stderr.startswith("Timeout (0:00:01)!") and "in start_mpi" in result.stderr


@needs_mpi
@pytest.mark.slow
@pytest.mark.soak  # its ranks import torch
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_plain_script_is_joined_and_stopping_mpiexec_leaves_nothing(
    stop: signal.Signals, waits: Path
) -> None:
    with started(2, waits) as job:
        assert job.stdout is not None
        first, second = (printed(job.stdout.readline()) for _ in range(2))
        assert first == second != []  # to the last bit, although they started apart
        mapped = shared_by(waits)
        assert mapped, "the ranks share no memory"
        found = {path for path in mapped if path.exists()}
        assert not found, f"stays in memory whatever becomes of the job: {found}"
        os.kill(job.pid, stop)
        job.communicate(timeout=PATIENCE)
        assert job.returncode != 0
        assert all_gone(waits)
