"""Tasks of srun are the nodes of a run; checked on Slurm's variables, and on a real Slurm of one node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.launch.environment import Place
from shoal.launch.slurm_step import SlurmStep, expand_counts, expand_hosts
from slurm import OneNodeSlurm, reason_to_skip, shoal_run, soon
from warm import programs

TASK = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_GTIDS": "4,5,6",
}


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a task of srun, and of nothing else."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SHOAL_PLACE", "PMI_", "OMPI_", "RANK", "WORLD_SIZE", "MASTER_")):
            monkeypatch.delenv(name)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("vm", ["vm"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("login,n[9-11]-ib", ["login", "n9-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ],
)
def test_the_short_form_of_host_names_is_read(short, hosts):
    assert list(expand_hosts(short)) == hosts


def test_the_short_form_of_counts_is_read():
    assert expand_counts("4(x2),3,1(x3)") == (4, 4, 3, 1, 1, 1)


def test_a_task_finds_its_place_and_where_all_meet(task):
    assert Place.find() == Place(rank=5, nodes=7, launched="slurm", transport="gloo")
    step = SlurmStep.find()
    assert step is not None and (step.address, step.local_tasks) == ("gpu09", 3)
    task.setenv("SLURM_STEP_ID", "1")
    other = SlurmStep.find()
    assert other is not None and other.port != step.port  # steps of one job may run at the same time
    task.setenv("MASTER_PORT", "29999")
    named = SlurmStep.find()
    assert named is not None and named.port == 29999


def test_tasks_of_one_host_meet_on_loopback(task):
    task.setenv("SLURM_STEP_NODELIST", "gpu09")
    step = SlurmStep.find()
    assert step is not None and step.address == "127.0.0.1"


def test_each_task_takes_the_cores_that_slurm_gives_it(task):
    task.setenv("SLURM_CPUS_PER_TASK", "6")
    assert Place.find().threads == 6


def test_a_batch_script_counts_as_started_by_hand(task):
    for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"):
        task.delenv(name)
    assert Place.find() == Place()


def test_a_batch_script_submitted_from_inside_a_step_counts_as_started_by_hand(task):
    for name, value in {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}.items():
        task.setenv(name, value)  # its own; the rest is that of the step it was submitted from
    assert Place.find() == Place()


def test_a_single_task_counts_as_started_by_hand_so_shoal_starts_its_own_workers(task):
    for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_GTIDS"):
        task.setenv(name, "0")
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"):
        task.setenv(name, "1")
    assert Place.find() == Place()


def test_where_srun_has_prepared_mpi_the_tasks_are_its_ranks_unless_told_otherwise(task):
    assert Place.find("mpi").launched == "mpi"  # with PMIx there is no variable that tells the size
    task.setenv("PMI_RANK", "5")
    task.setenv("PMI_SIZE", "7")
    assert (Place.find().launched, Place.find().transport) == ("mpi", "mpi")
    assert Place.find("gloo") == Place(rank=5, nodes=7, launched="slurm", transport="gloo")
    assert Place.find("grpc").launched == "slurm"


def test_torchrun_under_srun_comes_first(task):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        task.setenv(name, value)
    assert Place.find().launched == "torchrun"


# A real Slurm

real = [
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SCRIPT = Path(__file__).with_name("slurm_loop.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneNodeSlurm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
        patch.setenv("OMP_NUM_THREADS", "1")
        programs().start()
        with OneNodeSlurm(tmp_path_factory.mktemp("slurm")) as running:
            yield running


def warm_run(*arguments: str) -> tuple[str, ...]:
    """`shoal run` in processes that have imported torch."""
    return programs().python, *shoal_run(*arguments)[1:]


class TestRealSlurm:
    pytestmark = real

    @pytest.mark.parametrize(
        ("strategy", "workers", "tasks"),
        [pytest.param(("bmuf", "--strategy.period", "4"), 4, 4, marks=pytest.mark.soak), (("asgd",), 4, 5)],
        ids=["bmuf", "asgd"],
    )
    def test_srun_starts_the_workers_and_the_server(self, cluster, strategy, workers, tasks):
        line = warm_run("--strategy", *strategy, str(SCRIPT), "--steps", "20")
        printed = cluster.srun(tasks, *line)
        done = re.findall(r"^worker (\d) of (\d) has (\S+)$", printed, re.MULTILINE)
        assert sorted(rank for rank, _, _ in done) == [str(rank) for rank in range(workers)]
        assert {(of, model) for _, of, model in done} == {(str(workers), done[0][2])}  # one model for all

    def test_a_single_task_starts_workers_of_its_own(self, cluster):
        line = warm_run("-n", "2", "--quiet", "--strategy", "sync", str(SCRIPT), "--steps", "3")
        printed = cluster.srun(1, *line)
        assert len(re.findall(r"worker [01] of 2 has", printed)) == 2

    @pytest.mark.soak  # Slurm waits two minutes before it starts a requeued job
    @pytest.mark.parametrize(
        ("strategy", "stop"),
        [("bmuf", ("scancel", "--signal=USR1")), ("asgd", ("scontrol", "requeue"))],
        ids=["bmuf, before the time is up", "asgd, by the administrator"],
    )
    def test_a_requeued_job_resumes_where_it_was_stopped(self, cluster, tmp_path, strategy, stop):
        job = self.submit(cluster, tmp_path, strategy)
        log = tmp_path / "job.log"
        soon("training", lambda: log.exists() and log.read_text().count("is at 20") == 2)
        cluster(*stop, job)
        soon("the second turn", lambda: "begins at" in log.read_text().partition("stopped before step")[2])
        (tmp_path / "enough").touch()
        assert cluster.await_job(job) == "COMPLETED"
        said = log.read_text()
        stopped = re.search(r"shoal: stopped before step (\d+)\. The checkpoint is in", said)
        assert stopped is not None and int(stopped[1]) >= 20
        begun = re.findall(r"worker (\d) begins at (\d+)", said)
        assert sorted(begun) == sorted([("0", "0"), ("1", "0"), ("0", stopped[1]), ("1", stopped[1])])

    def submit(self, cluster: OneNodeSlurm, folder: Path, strategy: str) -> str:
        """Submit the script that `shoal manifest slurm` prints, with the code under test."""
        options = ("-n", "2", "--strategy", strategy, "--checkpoint", str(folder / "ckpt"))
        words = [*options, str(SCRIPT), "--until", str(folder / "enough")]
        printed = cluster(*shoal_run()[:-1], "manifest", "slurm", *words)
        path = folder / "bin"
        path.mkdir()
        shoal = path / "shoal"
        shoal.write_text(f'#!/bin/sh\nexec {" ".join(map(repr, shoal_run()[:-1]))} "$@"\n')
        shoal.chmod(0o755)
        batch = folder / "job.sbatch"
        batch.write_text(printed.replace("\n\n", f'\n\nexport PATH="{path}:$PATH"\n', 1))
        told = cluster("sbatch", "--parsable", f"--output={folder / 'job.log'}", str(batch))
        return told.strip()
