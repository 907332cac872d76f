"""What the manifests for Kubernetes share: resources, volumes, ports, and how pods reach a gRPC server."""

from __future__ import annotations

from typing import Any

from shoal.manifests.cluster_run import ClusterRun

GRPC_PORT = 50_051
SECRETS = "/etc/shoal"


def resources(run: ClusterRun, *, is_worker: bool = True) -> dict[str, Any]:
    """What a pod needs. A server computes no gradient, so it needs no GPU."""
    needs: dict[str, str] = {}
    if run.cpus:
        needs["cpu"] = str(run.cpus)
    if run.memory:
        needs["memory"] = run.memory
    if is_worker and run.gpus:
        needs["nvidia.com/gpu"] = str(run.gpus)
    return {"requests": needs, "limits": needs} if needs else {}


def listening(run: ClusterRun, pod_name: str) -> str:
    """The options, for a shell, with which the server in the pod `pod_name` can be reached; else empty."""
    if run.transport != "grpc":
        return ""
    options = [f"--listen 0.0.0.0:{GRPC_PORT}", f"--advertise {pod_name}.{run.name}"]
    if run.secret is None:
        options.append("--insecure")
    else:
        files = {"certificate": "tls.crt", "key": "tls.key", "authority": "ca.crt"}
        options += [f"--{option} {SECRETS}/{file}" for option, file in files.items()]
    return " ".join(options) + " "


def environment(run: ClusterRun) -> list[dict[str, Any]]:
    """The variables of a container: the token that admits a node."""
    if run.secret is None:
        return []
    return [
        {"name": "SHOAL_TOKEN", "valueFrom": {"secretKeyRef": {"name": run.secret, "key": "token"}}},
    ]


def mounts(run: ClusterRun) -> list[dict[str, Any]]:
    """Where a container finds the folder of checkpoints and the TLS files."""
    found: list[dict[str, Any]] = []
    if run.checkpoint is not None:
        found.append({"name": "checkpoints", "mountPath": run.checkpoint})
    if run.secret is not None:
        found.append({"name": "tls", "mountPath": SECRETS, "readOnly": True})
    return found


def volumes(run: ClusterRun) -> list[dict[str, Any]]:
    """The volumes behind `mounts`."""
    found: list[dict[str, Any]] = []
    if run.checkpoint is not None:
        claim = {"claimName": f"{run.name}-checkpoints"}
        found.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    if run.secret is not None:
        found.append({"name": "tls", "secret": {"secretName": run.secret}})
    return found


def grpc_service(run: ClusterRun, replicated_job: str) -> dict[str, Any]:
    """A headless service with the gRPC port of the pods of one replicated job."""
    labels = {
        "jobset.sigs.k8s.io/jobset-name": run.name,
        "jobset.sigs.k8s.io/replicatedjob-name": replicated_job,
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{run.name}-grpc"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "grpc", "port": GRPC_PORT}],
        },
    }
