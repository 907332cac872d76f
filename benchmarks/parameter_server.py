"""How fast a parameter server moves a large model, as ratios to what the machine can do in the same run.

    python benchmarks/parameter_server.py [--parameters N] [--rounds R] [--json FILE]

One worker pulls and pushes 74,770,901 float32 parameters (300 MB), through the very verbs an algorithm uses:
a push has been checked, applied and acknowledged when it returns. Beside it, in turn: a copy in memory, one
raw TCP connection, and a plain gRPC stream of 1 MiB protobuf messages. Shoal's gRPC shares no memory here, so
that its figures are those of the wire. Every figure is the median over rounds that visit all of them; the
spread is the quartiles.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.collectives import stripes
from shoal.core.codec import Identity
from shoal.core.identity import SERVER, NodeIdentity, slice_of
from shoal.core.replica import Parameters
from shoal.core.vector import first_bad
from shoal.engine.engine import Engine
from shoal.engine.protocol import Push
from shoal.launch.drive import drive
from shoal.launch.join import connect, file_store
from shoal.strategies import ASGD
from shoal.transports.shared_memory.memory import SWITCH
from shoal.vocabulary.node import Node

PARAMETERS = 74_770_901
CHUNK = 2**20
TIMEOUT = 120.0

TARGETS = {
    "shm_pull_over_copy": 0.7,
    "shm_push_over_copy": 0.4,
    "grpc_pull_over_tcp": 0.4,
    "grpc_push_over_tcp": 0.4,
    "grpc_pull_over_protobuf": 1.5,
    "grpc_push_over_protobuf": 1.5,
    "two_shards_over_one": 1.0,
    "server_memory_ratio": 2.5,  # at most; all others are at least
}

Pipe = Any
"""One end of a multiprocessing pipe."""


# -- the server's process --------------------------------------------------------------------------


def serve(kind: str, rank: int, shards: int, parameters: int, folder: str, report: Pipe) -> None:
    """Be a shard of an asynchronous server, and tell how much memory that took at most."""
    torch.set_num_threads(max(1, cores() // shards))  # the worker waits meanwhile
    before = peak_bytes()
    node = join(kind, rank, shards, parameters, folder)
    drive(ASGD().live(Node(node)))
    report.send(peak_bytes() - before)
    drive(node.transport.close())


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def join(kind: str, rank: int, shards: int, parameters: int, folder: str) -> Engine:
    """The worker (rank 0) or a shard of the server, connected to the others."""
    size = parameters
    if rank > 0:
        mine = slice_of(rank - 1, shards, parameters)
        size = mine.stop - mine.start
    me = NodeIdentity(rank, workers=1, servers=1, shards=shards)
    store = file_store(folder, me.nodes)
    os.environ[SWITCH] = "0" if kind == "grpc" else "1"  # gRPC is measured on the wire
    transport = connect(kind, me, store, vector_bytes=4 * parameters, timeout=TIMEOUT)
    return Engine(
        transport,
        Parameters(torch.zeros(size)),
        me,
        mean=stripes,
        codec=Identity(),
        timeout=TIMEOUT,
    )


def peak_bytes() -> int:
    """The most memory this process has had at once, shared memory that it touched included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


# -- what it is measured against -------------------------------------------------------------------


def drain_tcp(port: Pipe, nbytes: int) -> None:
    """Take `nbytes` from one connection into memory that is there already, as often as they come."""
    memory = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            while True:
                got = 0
                while got < nbytes:
                    count = connection.recv_into(memory[got:], nbytes - got)
                    if count == 0:
                        return
                    got += count
                connection.sendall(b"k")


def serve_protobuf(port: Pipe, nbytes: int) -> None:
    """A plain gRPC service that streams a vector both ways in protobuf messages of 1 MiB."""
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    memory = bytearray(nbytes)

    def push(chunks: Iterator[Any], _: Any) -> BytesValue:
        place = 0
        for chunk in chunks:
            memory[place : place + len(chunk.value)] = chunk.value
            place += len(chunk.value)
        return BytesValue()

    def pull(_: Any, __: Any) -> Iterator[BytesValue]:
        for place in range(0, nbytes, CHUNK):
            yield BytesValue(value=bytes(memory[place : place + CHUNK]))

    codec = {
        "request_deserializer": BytesValue.FromString,
        "response_serializer": BytesValue.SerializeToString,
    }
    handlers = {
        "Push": grpc.stream_unary_rpc_method_handler(push, **codec),
        "Pull": grpc.unary_stream_rpc_method_handler(pull, **codec),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", handlers),))
    port.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    port.recv()
    server.stop(0).wait(5)


@contextmanager
def protobuf_client(port: int, nbytes: int) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """A push and a pull through the plain service."""
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    memory = bytearray(nbytes)
    codec = {
        "request_serializer": BytesValue.SerializeToString,
        "response_deserializer": BytesValue.FromString,
    }
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        push_call = channel.stream_unary("/plain/Push", **codec)
        pull_call = channel.unary_stream("/plain/Pull", **codec)

        def push() -> None:
            view = memoryview(memory)
            chunks = (BytesValue(value=bytes(view[p : p + CHUNK])) for p in range(0, nbytes, CHUNK))
            push_call(chunks, timeout=TIMEOUT)

        def pull() -> None:
            place = 0
            for chunk in pull_call(BytesValue(), timeout=TIMEOUT):
                memory[place : place + len(chunk.value)] = chunk.value
                place += len(chunk.value)

        yield push, pull


# -- measuring -------------------------------------------------------------------------------------


class Bench:
    """Everything that is measured, started once and then visited in turn."""

    def __init__(self, parameters: int, folder: str) -> None:
        self.parameters = parameters
        self.nbytes = 4 * parameters
        self.visits: dict[str, Callable[[], None]] = {}
        self.memory: dict[str, int] = {}
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._x = torch.zeros(parameters)
        self._g = torch.full((parameters,), 1e-6)
        self._ends: list[Callable[[], None]] = []

    def add_copy(self) -> None:
        """One vector copied to another."""

        def visit() -> None:
            self._x.copy_(self._g)

        self.visits["copy"] = visit

    def add_server(self, name: str, kind: str, shards: int = 1) -> None:
        """Pull and push through a server of so many shards."""
        folder = str(Path(self._folder) / name)
        Path(folder).mkdir(mode=0o700)
        ours, theirs = zip(*(self._context.Pipe() for _ in range(shards)), strict=True)
        processes = [
            self._context.Process(
                target=serve, args=(kind, 1 + shard, shards, self.parameters, folder, theirs[shard])
            )
            for shard in range(shards)
        ]
        for process in processes:
            process.start()
        node = join(kind, 0, shards, self.parameters, folder)
        worker = Node(node)

        async def pull() -> None:
            await worker.pull(SERVER, out=self._x)

        async def push() -> None:
            await worker.push(SERVER, self._g, count=1, like=Push(rate=1e-3))

        self.visits[f"{name} pull"] = lambda: drive(pull())
        self.visits[f"{name} push"] = lambda: drive(push())

        def end() -> None:
            drive(node.transport.close())
            self.memory[name] = sum(pipe.recv() for pipe in ours)
            for process in processes:
                process.join(TIMEOUT)

        self._ends.append(end)

    def add_tcp(self) -> None:
        """One raw connection, answered by a single byte."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=drain_tcp, args=(theirs, self.nbytes))
        process.start()
        connection = socket.create_connection(("127.0.0.1", ours.recv()))
        memory = self._g.numpy().data.cast("B")

        def visit() -> None:
            connection.sendall(memory)
            assert connection.recv(1) == b"k"

        def end() -> None:
            connection.close()
            process.join(TIMEOUT)

        self.visits["tcp"] = visit
        self._ends.append(end)

    def add_protobuf(self) -> None:
        """The plain stream of protobuf messages."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve_protobuf, args=(theirs, self.nbytes))
        process.start()
        client = protobuf_client(ours.recv(), self.nbytes)
        self.visits["protobuf push"], self.visits["protobuf pull"] = client.__enter__()

        def end() -> None:
            client.__exit__(None, None, None)
            ours.send("done")
            process.join(TIMEOUT)

        self._ends.append(end)

    def run(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of every visit, in rounds; the first round warms up and does not count."""
        seconds: dict[str, list[float]] = {name: [] for name in self.visits}
        for number in range(rounds + 1):
            for name, visit in self.visits.items():
                began = time.perf_counter()
                visit()
                if number:
                    seconds[name].append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        """End every process that was started."""
        for end in self._ends:
            end()


def ratios(seconds: dict[str, list[float]], memory: dict[str, int], nbytes: int) -> dict[str, list[float]]:
    """Each figure in every round; speeds are inverse seconds."""

    def over(base: str, *parts: str) -> list[float]:
        return [b / sum(p) for b, *p in zip(seconds[base], *(seconds[part] for part in parts), strict=True)]

    both = [
        [a + b for a, b in zip(seconds[f"{n} pull"], seconds[f"{n} push"], strict=True)]
        for n in ("shm", "two")
    ]
    return {
        "shm_pull_over_copy": over("copy", "shm pull"),
        "shm_push_over_copy": over("copy", "shm push"),
        "grpc_pull_over_tcp": over("tcp", "grpc pull"),
        "grpc_push_over_tcp": over("tcp", "grpc push"),
        "grpc_pull_over_protobuf": over("protobuf pull", "grpc pull"),
        "grpc_push_over_protobuf": over("protobuf push", "grpc push"),
        "two_shards_over_one": [one / two for one, two in zip(*both, strict=True)],
        "server_memory_ratio": [max(memory[name] for name in ("shm", "grpc")) / nbytes],
    }


def main() -> None:
    """Measure, print, and say which targets were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        bench = Bench(options.parameters, folder)
        bench.add_copy()
        bench.add_server("shm", "processes")
        bench.add_server("two", "processes", shards=2)
        bench.add_tcp()
        bench.add_server("grpc", "grpc")
        bench.add_protobuf()
        try:
            seconds = bench.run(options.rounds)
        finally:
            bench.close()
    show(seconds, ratios(seconds, bench.memory, bench.nbytes), bench, options.json)


def profile(parameters: int) -> dict[str, float]:
    """Milliseconds of what a push through shared memory consists of, each by itself: the least of five."""
    x, g = torch.zeros(parameters), torch.full((parameters,), 1e-6)
    passes: dict[str, tuple[int, Callable[[], object]]] = {
        "copy, by the worker": (1, lambda: x.copy_(g)),
        "check, by the server": (cores(), lambda: first_bad(g)),
        "update, by the server": (cores(), lambda: x.sub_(g, alpha=1e-3)),
    }
    least = {}
    for name, (threads, work) in passes.items():
        torch.set_num_threads(threads)
        times = []
        for _ in range(6):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        least[name] = 1e3 * min(times[1:])
    torch.set_num_threads(1)
    return least


def show(
    seconds: dict[str, list[float]], figures: dict[str, list[float]], bench: Bench, file: Path | None
) -> None:
    """Print the speeds and the ratios, and write the ratios' medians as JSON."""
    size = f"{bench.parameters:,} float32, {bench.nbytes / 1e6:.0f} MB"
    print(f"{size}, {len(seconds['copy'])} rounds; one thread for the worker, {cores()} for a server")
    for name, times in seconds.items():
        low, middle, high = spread([bench.nbytes / t / 1e9 for t in times])
        print(f"  {name:14} {middle:6.2f} GB/s   ({low:.2f} to {high:.2f})")
    print("what a push through shared memory consists of:")
    for name, milliseconds in profile(bench.parameters).items():
        print(f"  {name:22} {milliseconds:6.1f} ms")
    medians = {}
    for name, values in figures.items():
        low, middle, high = spread(values)
        medians[name] = round(middle, 3)
        least = name != "server_memory_ratio"
        met = middle >= TARGETS[name] if least else middle <= TARGETS[name]
        goal = f"{'at least' if least else 'at most'} {TARGETS[name]:g}"
        print(f"  {name:26} {middle:6.3f}   ({low:.3f} to {high:.3f})   {goal}: {'met' if met else 'MISSED'}")
    if file is not None:
        file.write_text(json.dumps(medians, indent=2) + "\n")
    print(json.dumps(medians))


def spread(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


if __name__ == "__main__":
    main()
