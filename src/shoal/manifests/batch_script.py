"""A batch script for Slurm: sbatch starts it, srun starts its tasks, and it requeues itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from shoal.manifests.cluster_run import INTERRUPTED, ClusterRun


def batch_script(run: ClusterRun) -> str:
    """The text of the script."""
    return "\n".join(("#!/bin/bash", *_directives(run), "", *_commands(run))) + "\n"


def _directives(run: ClusterRun) -> Iterator[str]:
    servers = f", the last {run.servers} for servers" if run.servers > 1 else ", the last for the server"
    options = {
        f"job-name={run.name}": "",
        f"ntasks={run.nodes}": f"{run.workers} workers{servers if run.servers else ''}",
        f"nodes={run.hosts}": "" if run.hosts else None,
        f"cpus-per-task={run.cpus}": "" if run.cpus else None,
        f"gpus-per-task={run.gpus}": "" if run.gpus else None,
        f"mem-per-cpu={run.memory}": "" if run.memory else None,
        f"time={run.time}": "" if run.time else None,
        "output=%x-%j.log": "",
        "open-mode=append": "a requeued job goes on in the same file",
    }
    if run.checkpoint is not None:
        options["requeue"] = "after a node failure, or when a job of higher priority took the nodes"
        options[f"signal=USR1@{run.grace_seconds}"] = "seconds before the time is up: save a checkpoint"
    for option, why in options.items():
        if why is not None:
            yield f"#SBATCH --{option}" + (f"  # {why}" if why else "")


def _commands(run: ClusterRun) -> Iterator[str]:
    if run.cpus:
        yield f"export SRUN_CPUS_PER_TASK={run.cpus}  # newer versions of srun do not inherit it"
    yield "# A worker that fails ends the others by itself; srun must not kill a server that still saves."
    begin = "srun --kill-on-bad-exit=0"
    if run.transport == "grpc":
        yield f'{begin} bash -c \'exec shoal run --listen 0.0.0.0 --advertise "$SLURMD_NODENAME" "$@"\' \\'
        yield f"    {shlex.join(run.command_after('run'))}"
    else:
        yield f"{begin} {shlex.join(run.command())}"
    if run.checkpoint is None:
        return
    yield "code=$?"
    yield f"if [ $code -eq {INTERRUPTED} ]; then  # stopped with a checkpoint: go on from it in a new turn"
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield "exit $code"
