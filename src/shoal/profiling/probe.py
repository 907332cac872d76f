"""One of two processes that test the transports: python -m shoal.profiling.probe RANK FOLDER.

`shoal doctor` and `shoal calibrate` start them. Under mpiexec: python -m shoal.profiling.probe mpi. The test
runs in its own processes because a transport that does not work on a machine may abort instead of raising.
Rank 0 prints one line of JSON after each transport.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message, Transport
from shoal.launch.control import leave_with_parent
from shoal.launch.drive import drive
from shoal.launch.environment import Place
from shoal.launch.join import connect, file_store

KINDS = ("processes", "gloo", "grpc")
ROUNDS = 100
BULK_ROUNDS = 10
BULK_BYTES = 1 << 24
TIMEOUT_SECONDS = 5.0


async def measure(transport: Transport) -> dict[str, float]:
    """Seconds per round trip of an empty message, and bytes per second of large ones, measured at rank 0.

    So are the processor seconds that an empty message takes at each end.
    """
    bulk = torch.zeros(BULK_BYTES // 4)
    if transport.rank == 1:
        for rounds in (ROUNDS, BULK_ROUNDS):
            began = time.process_time()
            for _ in range(rounds):
                await transport.recv(TIMEOUT_SECONDS)
                await transport.send(0, Message("pong"))
            await transport.send(0, Message("busy", count=(time.process_time() - began) / rounds))
        return {}
    began = time.process_time()
    trips, theirs = await _round_trips(transport, Message("ping"), ROUNDS)
    ours = (time.process_time() - began) / ROUNDS
    bulk_trips, _ = await _round_trips(transport, Message("ping", (bulk,)), BULK_ROUNDS)
    return {
        "round_trip": statistics.median(trips),
        "bandwidth": BULK_BYTES / min(bulk_trips),
        "message": (ours + theirs) / 4,  # a round trip is two that are sent and two that are received
    }


async def _round_trips(transport: Transport, m: Message, rounds: int) -> tuple[list[float], float]:
    """Seconds of each round trip, and the processor seconds of one at the other process."""
    trips = [await _round_trip(transport, m) for _ in range(rounds)]
    return trips, (await transport.recv(TIMEOUT_SECONDS)).count


async def _round_trip(transport: Transport, m: Message) -> float:
    began = time.perf_counter()
    await transport.send(1, m)
    await transport.recv(TIMEOUT_SECONDS)
    return time.perf_counter() - began


def trial(kind: str, rank: int, meeting: Path | None = None) -> dict[str, float | str]:
    """The figures of this transport, or the problem with it."""
    try:
        store = None
        if meeting is not None:
            meeting.mkdir(exist_ok=True)
            store = file_store(meeting, 2)
        transport = connect(
            kind, NodeIdentity(rank, 2), store, vector_bytes=BULK_BYTES, timeout=TIMEOUT_SECONDS
        )
        try:
            return {**drive(measure(transport))}
        finally:
            drive(transport.close())
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def meet(folder: Path, place: str, rank: int, size: int) -> None:
    """Wait until so many processes are at that place, however slow; who started them ends those that wait."""
    (folder / f"{place}-{rank}").touch()
    while not all((folder / f"{place}-{other}").exists() for other in range(size)):
        time.sleep(0.001)


def main() -> None:
    """Test every real transport with the process that got the same folder."""
    leave_with_parent()
    torch.set_num_threads(1)
    if sys.argv[1] == "mpi":
        rank, folder = Place.find().rank, None
    else:
        rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    if folder is not None:
        meet(folder, "started", rank, 2)
    if rank == 0:
        print("started", flush=True)
    for kind in ("mpi",) if folder is None else KINDS:
        found = trial(kind, rank, None if folder is None else folder / kind)
        if rank == 0:
            print(json.dumps({"transport": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
