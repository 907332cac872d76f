"""ray_hosts: the nodes of a Ray cluster as the hosts of a run, reserved by a placement group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.placement_group import remove_placement_group as give_back
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.core.errors import Unavailable
from shoal.launch.hosts import Host, HostList
from shoal.ray.agent_actor import ActorProcess, AgentActor

PATIENCE = 60.0
"""How long the cluster may take to find room."""

TRAVELLING = ("PYTHONPATH", "SHOAL_DATA", "SHOAL_SHARED_MEMORY", "OMP_NUM_THREADS")
"""Variables that agents and nodes get if they are set at the launcher."""


@contextmanager
def ray_hosts(workers: int, servers: int, cpus: float = 1.0) -> Iterator[HostList]:
    """Reserve `cpus` cores for each worker and server, and yield the Ray nodes on which they are.

    Joins the cluster at RAY_ADDRESS, or the one on this machine. Raises Unavailable if there is none, or if
    it has no room.
    """
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except ConnectionError:
        raise Unavailable(
            "--on ray found no Ray cluster. Start one with: ray start --head; or set RAY_ADDRESS"
        ) from None
    try:
        bundles = [{"CPU": cpus} for _ in range(workers + servers)]
        group = placement_group(bundles, strategy="PACK", name="shoal")
        try:
            if not group.wait(PATIENCE):
                there = ray.cluster_resources().get("CPU", 0)
                raise Unavailable(
                    f"the Ray cluster has no room for {workers + servers} processes with {cpus:g} cores each "
                    f"within {PATIENCE:g} s; it has {there:g} cores in all"
                )
            yield _read(group, workers)
        finally:
            give_back(group)
    finally:
        ray.shutdown()


def _read(group: PlacementGroup, workers: int) -> HostList:
    """The Ray nodes that hold the bundles of the group. The first bundles are the workers'."""
    table = placement_group_table(group)["bundles_to_node_id"]
    at = [table[bundle] for bundle in range(len(table))]
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = list(dict.fromkeys(at))
    hosts = tuple(Host(names[node], at[:workers].count(node), names[node]) for node in nodes)
    first_bundle = {number: at.index(node) for number, node in enumerate(nodes)}
    started = iter(range(len(nodes)))
    variables = {name: os.environ[name] for name in TRAVELLING if name in os.environ}

    def start(host: Host, command: Sequence[str]) -> ActorProcess:
        """Start the agent of the next host: agents are started in the order of the hosts."""
        where = PlacementGroupSchedulingStrategy(group, first_bundle[next(started)])
        remote = ray.remote(AgentActor).options(
            num_cpus=0, max_concurrency=2, scheduling_strategy=where, max_restarts=0
        )
        return ActorProcess(remote.remote(variables))

    homes = tuple(nodes.index(node) for node in at)
    return HostList(hosts, homes=homes, variables=variables, start=start)
