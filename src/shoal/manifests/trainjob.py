"""A TrainJob of Kubeflow Trainer: torchrun in each pod reads the trainer's variables, starts `shoal run`."""

from __future__ import annotations

from typing import Any

from shoal.manifests import pods
from shoal.manifests.cluster_run import ClusterRun

RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime for PyTorch that Kubeflow Trainer brings along."""

JOB = "node"
"""The replicated job of that runtime, and its container."""

MANAGER = "shoal.dev/manifest"


def trainjob(run: ClusterRun) -> list[dict[str, Any]]:
    """The manifests. The last pods are the servers; they have the resources of the others."""
    trainer: dict[str, Any] = {
        "image": run.image,
        "command": _command(run),
        "numNodes": run.nodes,
        "numProcPerNode": 1,
    }
    if needs := pods.resources(run):
        trainer["resourcesPerNode"] = needs
    if variables := pods.environment(run):
        trainer["env"] = variables
    whole = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": run.name},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": trainer,
            "runtimePatches": [_patch(run)],
        },
    }
    return [pods.grpc_service(run, JOB), whole] if run.transport == "grpc" else [whole]


def _command(run: ClusterRun) -> list[str]:
    torchrun = ["torchrun", "--no-python"]
    if run.transport != "grpc":
        return [*torchrun, *run.command()]
    own_name = f"{run.name}-{JOB}-0-$PET_NODE_RANK"
    start = f'exec {" ".join(torchrun)} shoal run {pods.listening(run, own_name)}"$@"'
    return ["sh", "-c", start, *run.command_after("run")]


def _patch(run: ClusterRun) -> dict[str, Any]:
    """What a TrainJob cannot say of its pods: time to save a checkpoint in, and volumes."""
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": run.grace_seconds}
    if mounts := pods.mounts(run):
        pod["volumes"] = pods.volumes(run)
        pod["containers"] = [{"name": JOB, "volumeMounts": mounts}]
    job = {"name": JOB, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }
