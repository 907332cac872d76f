"""A JobSet for Kubernetes: a replicated job of workers and one of servers.

Its controller makes a headless service, because `enableDNSHostnames` asks for it: each pod then has a name of
its own, by which the others reach it.
"""

from __future__ import annotations

from typing import Any

from shoal.manifests import pods
from shoal.manifests.cluster_run import ClusterRun

MEETING_PORT = 29_500

RESTARTS = 10
"""How often a run is started again from its checkpoint."""


def jobset(run: ClusterRun) -> list[dict[str, Any]]:
    """The manifests. The ranks of the workers come first, those of the servers last."""
    jobs = [_job(run, "workers", 0, run.workers)]
    if run.servers:
        jobs.append(_job(run, "servers", run.workers, run.servers))
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name},
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": run.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": RESTARTS if run.checkpoint else 0},
            "replicatedJobs": jobs,
        },
    }
    if run.transport != "grpc":
        return [whole]
    return [pods.grpc_service(run, "servers" if run.servers else "workers"), whole]


def _job(run: ClusterRun, name: str, first_rank: int, number: int) -> dict[str, Any]:
    """A job of `number` pods, whose ranks begin with `first_rank`."""
    spec = {
        "completionMode": "Indexed",
        "completions": number,
        "parallelism": number,
        "backoffLimit": 0,  # a run is started again as a whole
        "template": {"spec": _pod(run, name, first_rank)},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _pod(run: ClusterRun, job: str, first_rank: int) -> dict[str, Any]:
    own_name = f"{run.name}-{job}-0-$JOB_COMPLETION_INDEX"
    # Kubernetes numbers the pods of each job from 0
    rank = f"$(({first_rank} + JOB_COMPLETION_INDEX))" if first_rank else "$JOB_COMPLETION_INDEX"
    # exec, so that SIGTERM reaches shoal and not the shell
    start = f"RANK={rank} exec shoal run {pods.listening(run, own_name)}"
    container: dict[str, Any] = {
        "name": "shoal",
        "image": run.image,
        "command": ["sh", "-c", f'{start}"$@"', *run.command_after("run")],
        "env": [
            {"name": "WORLD_SIZE", "value": str(run.nodes)},
            {"name": "LOCAL_WORLD_SIZE", "value": "1"},
            {"name": "MASTER_ADDR", "value": f"{run.name}-workers-0-0.{run.name}"},
            {"name": "MASTER_PORT", "value": str(MEETING_PORT)},
            *pods.environment(run),
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": run.grace_seconds,
        "containers": [container],
    }
    if needs := pods.resources(run, is_worker=job == "workers"):
        container["resources"] = needs
    if mounts := pods.mounts(run):
        container["volumeMounts"], pod["volumes"] = mounts, pods.volumes(run)
    return pod
