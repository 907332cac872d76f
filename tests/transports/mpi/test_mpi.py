"""MPI: the conformance suite, sums and windows, all in one job; what is missing is said clearly."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi_ranks import needs_mpi, run_job

from forked import run_forked
from shoal.core.errors import Unavailable
from shoal.testing.conformance import CHECKS

pytestmark = [pytest.mark.slow, needs_mpi]

Lines = list[dict[str, Any]]


def job(name: str, ranks: int, **environment: str) -> Lines:
    """What the ranks of a job found out; all of them came to its end."""
    result = run_job(ranks, Path(__file__).with_name("mpi_job.py"), name, warm=True, **environment)
    assert result.returncode == 0, result.stderr or result.stdout
    return [json.loads(line) for line in result.stdout.splitlines()]


def told(lines: Lines, what: str) -> dict[int, Any]:
    return {line["rank"]: line[what] for line in lines if what in line}


@pytest.fixture(scope="module")
def near() -> Lines:
    """All that three ranks find out which share memory."""
    return job("all", 3)


@pytest.fixture(scope="module")
def crowded() -> Lines:
    """Windows of five ranks."""
    return job("windows", 5)


@pytest.fixture(scope="module")
def distant() -> Lines:
    """Windows where MPICH takes its ranks to be on different hosts: they share no memory."""
    return job("distant", 3, MPIR_CVAR_NOLOCAL="1")


# Messages


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[..., None], near: Lines) -> None:
    passed = {line["rank"] for line in near if line.get("check") == check.__name__}
    assert passed == {0, 1, 2}


def test_64_megabytes_cross_without_deadlock(near: Lines) -> None:
    assert told(near, "crossed") == {0: 64 << 20, 1: 64 << 20}


def test_a_message_above_the_limit_is_refused_and_keeps_nobody_waiting(near: Lines) -> None:
    assert told(near, "refused") == {1: "a message of 41,943,040 bytes exceeds the limit of 4,000"}


def test_a_header_of_any_other_length_is_refused_before_memory_is_taken_for_it(near: Lines) -> None:
    assert told(near, "length") == {1: "an MPI message with tag 0 has 104 bytes, got 33,554,432"}
    assert told(near, "allocated")[1] < 1 << 20


def test_an_mpiexec_of_another_library_is_noticed(near: Lines) -> None:
    said = told(near, "expected")
    assert said[1].startswith(
        "the launcher says that this is node 1 of 7, MPI says 1 of 3: mpiexec and mpi4py"
    )
    assert told(near, "workers")[0] == "workers=9 must be 1 to size=3"


# Sums


def test_only_workers_take_part_in_a_sum(near: Lines) -> None:
    assert told(near, "sum") == {0: [3.0] * 10, 1: [3.0] * 10}
    assert told(near, "sent") == {0: 40, 1: 40}  # 2 * (2 - 1) / 2 * 40 bytes
    assert told(near, "outsider") == {2: "node 2 is not a worker and cannot take part in all_reduce"}


def test_different_lengths_and_dtypes_are_named(near: Lines) -> None:
    lengths = (
        "all_reduce 1 needs the same dtype and length from all: worker 0 has 1000 x float32, "
        "worker 1 has 1500 x float32, worker 2 has 1000 x float32"
    )
    assert told(near, "mismatch") == dict.fromkeys(range(3), lengths)
    for said in told(near, "departure").values():
        assert said.startswith(
            "all_reduce 10 needs the same dtype and length from all: worker 0 has 4 x float32"
        )
        assert "worker 1 has 4 x float64" in said


def test_what_was_begun_early_is_summed_early_or_given_up(near: Lines) -> None:
    for part in ("a_part_is_summed_before_the_rest_is_computed", "a_sum_that_is_never_finished_keeps_nobody"):
        assert {line["rank"] for line in near if line.get("passed") == part} == {0, 1, 2}


def test_a_worker_that_does_not_join_a_sum_is_named(near: Lines) -> None:
    said = told(near, "missing")
    assert said.keys() == {0, 2}
    for rank, text in said.items():
        what, who = text.split(": ")
        assert what == f"all_reduce 2 of 1000 x float32 failed (I am worker {rank})"
        # whoever gives up first may have left before the other has looked round
        assert {"worker 1 did not come in time", "worker 1 is gone"} & set(who.split(", "))


def test_a_worker_that_left_is_named(near: Lines) -> None:
    expected = "all_reduce 1 of 3 x float32 failed (I am worker {}): worker 1 is gone"
    assert told(near, "left") == {rank: expected.format(rank) for rank in (0, 2)}


# Windows


PLACES = {"near": 3, "distant": 3, "crowded": 5}
WHERE = ["near", *(pytest.param(where, marks=pytest.mark.soak) for where in ("distant", "crowded"))]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.soak
def test_no_addition_is_lost_and_each_counts_once(
    dtype: str, where: str, request: pytest.FixtureRequest
) -> None:
    """The job compares the sums exactly; here, the numbers that the additions were given."""
    lines = [line for line in request.getfixturevalue(where) if line.get("of") == dtype]
    numbers = sorted(number for line in lines for number in line["before"])
    assert len(lines) == PLACES[where] - 1
    assert numbers == list(range(len(numbers)))
    for line in lines:
        assert line["before"] == sorted(line["before"])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "part", ["one_worker_is_serial", "an_owner_helps_while_it_computes_and_after_it_has_closed"]
)
def test_what_the_job_itself_asserts(part: str, where: str, request: pytest.FixtureRequest) -> None:
    lines = request.getfixturevalue(where)
    assert {line["rank"] for line in lines if line.get("passed") == part} == set(range(PLACES[where]))


@pytest.mark.soak
def test_the_owner_of_a_window_need_not_call_anything(distant: Lines) -> None:
    """It slept for half a second while others added to its memory."""
    assert max(told(distant, "helped").values()) < 0.4


def test_what_does_not_fit_a_window_is_named(near: Lines) -> None:
    assert told(near, "dtype")[0] == "a window holds float32 or float64, not torch.float16"
    assert told(near, "nobody")[0] == "there is no node 9: nodes are 0 to 2"
    assert told(near, "unopened")[0] == "node 0 has no open window"
    assert told(near, "again")[0] == "node 0 already has a window"
    assert told(near, "short")[0] == ("the window of node 0 holds 4 x torch.float32, not 3 x torch.float32")
    assert told(near, "lengths")[2].startswith(
        "a window needs vectors of one dtype and length from all nodes: node 0 4 of 4 bytes, node 1 5 of"
    )


def test_idle_ranks_leave_the_cores_alone(near: Lines) -> None:
    idle = told(near, "idle")
    assert len(idle) == 3 and sum(idle.values()) < 0.5, f"of a core: {idle}"


@pytest.mark.soak
def test_a_frozen_owner_keeps_nobody_waiting(distant: Lines) -> None:
    assert told(distant, "frozen") == {0: "node 1 did not complete an addition to its window within 0.5 s"}
    assert told(distant, "waited")[0] < 5.0


# What is missing


def test_without_mpi4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "shoal.transports.mpi", raising=False)
    with pytest.raises(Unavailable) as info:
        importlib.import_module("shoal.transports.mpi")
    assert str(info.value) == "transport 'mpi' needs mpi4py. Install it with: pip install 'shoal[mpi]'"


def test_shoal_itself_does_not_start_mpi() -> None:
    code = "import sys, shoal, shoal.cli; print('mpi4py' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr


def test_an_mpi_without_threads_is_refused() -> None:
    code = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from shoal.transports.mpi import MpiTransport
MpiTransport.connect(limit_bytes=1)
"""
    result = run_forked([sys.executable, "-c", code])
    assert "needs MPI_THREAD_MULTIPLE, but MPI was started without it" in result.stderr
    assert result.returncode == 1
