"""A worker may be a group of processes. Which processes are a group, and who meets whom between groups.

A run of n workers in groups of G is G runs of n workers, side by side: the processes in position g of all
groups find each other in a store of their own, and keep their shard together as if it were the whole model.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import distributed as dist

from shoal.launch.environment import Place
from shoal.launch.meeting_place import GLOO_INTERFACE
from shoal.transports.rendezvous import await_keys, missing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORKERS = "workers"
"""The dimension of a mesh that counts the workers. All other dimensions lie inside a worker."""

LOOPBACK = "127.0.0.1"

Ranks: TypeAlias = "tuple[int, ...]"
"""The ranks in torch.distributed of the processes of one worker, in the order of their positions."""


def join_group(place: Place, mesh: DeviceMesh | None) -> Place:
    """The place of this process in a run whose workers are groups. `mesh` says who is in this group.

    Waits for all processes where Shoal has not started them. Raises ValueError if the mesh does not fit how
    they were started.
    """
    if mesh is None:
        if place.group > 1:
            raise ValueError(
                f"--group {place.group} started {place.group} processes for each worker; say which of them "
                "holds what: shoal.attach(model, optimizer, mesh=mesh)"
            )
        return place
    ranks = ranks_inside(mesh)
    if len(ranks) == place.group == 1:
        return place
    if place.launched == "shoal":
        return _check_launched(place, ranks)
    if place.launched == "mpi":
        raise ValueError("mpiexec started the processes; for a mesh use `shoal run --group` or torchrun")
    return _regroup(place, ranks)


def ranks_inside(mesh: DeviceMesh) -> Ranks:
    """The processes of this worker in a mesh that lies inside it, or that has a dimension for workers."""
    inside = _inside(mesh)
    return (dist.get_rank(),) if inside is None else tuple(inside.mesh.flatten().tolist())


def groups_inside(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """The groups of this worker's processes that torch has, one for each dimension of their mesh."""
    inside = None if mesh is None else _inside(mesh)
    return [] if inside is None else inside.get_all_groups()


def _inside(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh without its dimension for workers; None if it has no other."""
    names = mesh.mesh_dim_names or ()
    if WORKERS not in names:
        return mesh
    rest = tuple(name for name in names if name != WORKERS)
    return mesh[rest] if rest else None


def _check_launched(place: Place, ranks: Ranks) -> Place:
    """Raise ValueError unless the mesh has the processes that `shoal run` started for this worker."""
    if ranks != tuple(range(place.rank * place.group, (place.rank + 1) * place.group)):
        raise ValueError(
            f"the mesh has processes {_listed(ranks)} in this worker, and `shoal run --group {place.group}` "
            f"makes processes of following ranks one: use init_device_mesh(device, (WORLD_SIZE // group, "
            f'group), mesh_dim_names=("{WORKERS}", "inside")), and start with --group {len(ranks)}'
        )
    return place


def _regroup(place: Place, ranks: Ranks) -> Place:
    """The place of this process once all have said who is in their group."""
    store = place.open_store()
    if store is None or place.rank not in ranks or (dist.is_initialized() and dist.get_rank() != place.rank):
        raise ValueError(
            f"the mesh has processes {_listed(ranks)} in this worker, and the launcher started this one as "
            f"process {place.rank} of {place.nodes}; give attach() the mesh in which it is, and "
            "init_process_group() the launcher's rank"
        )
    keys = {rank: f"group/{rank}" for rank in range(place.nodes)}
    store.set(keys[place.rank], json.dumps(ranks))
    if absent := await_keys(store, keys, place.timeout):
        raise missing(place.rank, absent, place.timeout, "call attach() with a mesh")
    groups = sorted({tuple(json.loads(store.get(key))) for key in keys.values()}, key=min)
    if sorted(rank for group in groups for rank in group) != list(range(place.nodes)) or any(
        len(group) != len(ranks) for group in groups
    ):
        said = "; ".join(map(_listed, groups))
        raise ValueError(
            f"the meshes must put each of the {place.nodes} processes into one worker, all workers of the "
            f"same size; they say: {said}"
        )
    worker = groups.index(ranks)
    return replace(place, rank=worker, nodes=len(groups), group=len(ranks), position=ranks.index(place.rank))


class GroupNumbers:
    """Lets the processes of a group tell each other a number. All must ask equally often."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._asked = 0

    def __call__(self, number: int) -> list[int]:
        """The numbers of all of them, in the order of their positions. Waits for them."""
        place, store = self._place, self._place.open_common_store()
        if store is None or place.group == 1:
            return [number]
        keys = {g: f"numbers/{self._asked}/{place.rank}/{g}" for g in range(place.group)}
        self._asked += 1
        store.set(keys[place.position], str(number))
        if absent := await_keys(store, keys, place.timeout):
            raise missing(place.position, absent, place.timeout, "resume with its group")
        return [int(store.get(key)) for key in keys.values()]


def _listed(ranks: Ranks) -> str:
    return ", ".join(map(str, ranks))


@contextmanager
def mesh_of_worker(folder: Path, rank: int, position: int, size: int, timeout: float) -> Iterator[DeviceMesh]:
    """A mesh of the `size` processes of worker `rank`, over gloo; they meet in a folder of this host."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(_loopback_for_gloo())
    store = dist.FileStore(str(folder / f"worker-{rank}"), size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=position, world_size=size, timeout=limit)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("inside",))
    finally:
        dist.destroy_process_group()


@contextmanager
def torch_meeting_point() -> Iterator[tuple[str, int]]:
    """Keep a store on this host in which `init_process_group` meets. Yields its address and port.

    The launcher keeps it, so that it outlives a group that dies, and other hosts cannot reach it.
    """
    listening = socket.create_server((LOOPBACK, 0), backlog=1024)
    port: int = listening.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=False,  # which would leave a pipe open in the launcher
    )
    try:
        yield LOOPBACK, port
    finally:
        del store


def torch_variables(process: int, processes: int, meeting_point: tuple[str, int]) -> Mapping[str, str]:
    """The variables that torchrun would set in one of the processes of this host."""
    address, port = meeting_point
    return {
        "RANK": str(process),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(process),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher keeps the store, not rank 0
        **_loopback_for_gloo(),
    }


def _loopback_for_gloo() -> Mapping[str, str]:
    """The variable that has gloo listen on this host alone, unless it is set."""
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {GLOO_INTERFACE: interface} if interface and GLOO_INTERFACE not in os.environ else {}
