"""A real Slurm of one node for a test: munged, slurmctld and slurmd, each on ports and files of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
INSTALL = "apt-get install slurm-wlm munge"
SYSTEM = "/usr/sbin:/sbin"  # where daemons are, which is not on every user's path

# a requeued job waits until the credentials of its first turn have expired; by default two minutes
CONFIGURATION = """\
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SwitchType=switch/none
ReturnToService=2
KillWait=60
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str:
    """Why there can be no Slurm here; empty if there can."""
    lacking = [name for name in PROGRAMS if find(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found; install with: {INSTALL}"
    return "" if os.geteuid() == 0 else "slurmd must be started by root"


def find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), SYSTEM)))


class OneNodeSlurm:
    """Starts the three daemons in `folder`, in the foreground, and ends them by their ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> OneNodeSlurm:
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        text = CONFIGURATION.format(
            folder=self.folder, host=socket.gethostname(), ports=[free_port(), free_port()]
        )
        (self.folder / "slurm.conf").write_text(text)
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start_all(self) -> None:
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        soon("munged to listen", (munge / "socket").exists)
        self._start("slurmctld", "-D", "-i")
        self._start("slurmd", "-D")
        soon("the node to be idle", lambda: "idle" in self("sinfo", "--noheader", "-o", "%T", check=False))

    def _start(self, program: str, *options: str) -> None:
        path = find(program)
        assert path is not None
        with (self.folder / f"{program}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [path, *options], env=self.environment, stdout=output, stderr=subprocess.STDOUT
                )
            )

    def __call__(self, *line: str, check: bool = True) -> str:
        """What a program prints that talks to this Slurm."""
        done = subprocess.run(
            line, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def srun(self, tasks: int, *line: str) -> str:
        """What the tasks of a step print, once all have ended well."""
        return self("srun", f"--ntasks={tasks}", *line)

    def await_job(self, job: str) -> str:
        """The state in which a job ends."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        return soon("the job to end", lambda: next((s for s in ended if s in self.state(job)), ""))

    def state(self, job: str) -> str:
        fields = dict(field.partition("=")[::2] for field in self("scontrol", "show", "job", job).split())
        return fields["JobState"]


def soon(what: str, is_so, seconds: float = 300.0):
    """What `is_so` returns as soon as that is true. The bound is for a machine with much else to do."""
    deadline = time.monotonic() + seconds
    while not (answer := is_so()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)
    return answer


def shoal_run(*arguments: str) -> Sequence[str]:
    """The words of `shoal run`, of the code under test."""
    return (sys.executable, "-c", "from shoal.cli import main; main()", "run", *arguments)
