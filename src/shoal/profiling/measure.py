"""Measures what `Profile` describes, on this machine, in about a minute."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shoal.codecs import CODECS
from shoal.core.codec import Codec
from shoal.core.errors import Unavailable
from shoal.launch.huge_pages import with_huge_pages
from shoal.launch.join import local_threads
from shoal.profiling.fitting import fit_wirings, real_steps
from shoal.profiling.probe_processes import hear, start_probe
from shoal.sim.hardware import Handling, Profile, Speeds, Wiring

CROWD_SECONDS = 120.0
"""How long the processes that train at the same time may take, their start included."""

ELEMENTS = 1 << 20
"""Of the vector that codecs compress."""

REPEATS = 3

MODELLED = ("processes", "grpc")
"""Transports whose messages virtual time has the costs of; gloo forms averages by itself."""

Telling = Callable[[str], None]


def measure_profile(tell: Telling = lambda _: None) -> Profile:
    """Everything that can be measured on this machine; `tell` hears what is being measured."""
    cores = local_threads(1)
    tell(f"training in 1 to {cores} processes")
    slowdown = measure_slowdown(cores)
    tell("operations on vectors, and codecs")
    profile = Profile(platform.node(), cores, slowdown, measure_vectors(), codecs=measure_codecs())
    among, served = measure_transports(profile, tell)
    return replace(profile, transports=among, servers=served)


def measure_slowdown(cores: int) -> tuple[float, ...]:
    """How many times as long a step takes while 1, 2, ... processes train, each on a core of its own."""
    sizes = [1 << k for k in range(cores.bit_length()) if 1 << k < cores] + [cores]
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        rest = [folder, ",".join(map(str, sizes))]
        line = [sys.executable, "-m", "shoal.profiling.crowd"]
        crowd = [
            subprocess.Popen(
                [*line, str(rank), *rest], stdout=subprocess.PIPE, text=True, env=with_huge_pages(os.environ)
            )
            for rank in range(cores)
        ]
        try:
            said, _ = crowd[0].communicate(timeout=CROWD_SECONDS)
        except subprocess.TimeoutExpired:
            said = ""
        finally:
            for process in crowd:
                process.kill()
                process.communicate()
    if not said:
        raise Unavailable(f"{cores} processes that train at the same time did not come to their end")
    steps = dict(zip(sizes, json.loads(said), strict=True))
    return tuple(max(1.0, _between(steps, size) / steps[1]) for size in range(1, cores + 1))


def _between(steps: dict[int, float], size: int) -> float:
    """The step in a crowd of that size, from those of the nearest sizes that were measured."""
    below, above = max(s for s in steps if s <= size), min(s for s in steps if s >= size)
    share = 0.0 if above == below else (size - below) / (above - below)
    return steps[below] + share * (steps[above] - steps[below])


def measure_transports(profile: Profile, tell: Telling) -> tuple[dict[str, Wiring], dict[str, Wiring]]:
    """What messages cost among workers, and to a server, over each transport that is modelled and works here.

    The profile has what else costs time.
    """
    tell("links between processes")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        figures, _ = hear([start_probe(rank, folder) for rank in range(2)])
    works = {kind: found for kind, found in figures.items() if kind in MODELLED and "problem" not in found}
    real = real_steps(list(works), tell)
    fitted = {kind: fit_wirings(profile, kind, latency_of(found), real) for kind, found in works.items()}
    among, served = ({kind: pair[k] for kind, pair in fitted.items()} for k in range(2))
    return among, served


def latency_of(found: dict[str, Any]) -> float:
    """Seconds on the way, from what a probe has printed: neither end is busy then."""
    return max(0.0, float(found["round_trip"]) / 2 - 2 * float(found["message"]))


def measure_vectors() -> Handling:
    """What adding one vector to another costs: short ones, and each byte that is read or written."""
    one, other = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    first, second = one[:1], other[:1]
    short = _fastest(lambda: [first.add_(second, alpha=0.5) for _ in range(1000)]) / 1000
    return Handling(short, max(0.0, _fastest(lambda: one.add_(other, alpha=0.5)) - short) / (3 * one.nbytes))


def measure_codecs() -> dict[str, Speeds]:
    """Seconds a byte of every codec that compresses a vector by itself, without layers or other workers."""
    v = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    found = {}
    for word in CODECS:
        codec = CODECS.make(word)
        if not (codec.exact or codec.needs_all or codec.needs_products):
            found[word] = _speeds(codec.fit(()), v)
    return found


def _speeds(codec: Codec, v: torch.Tensor) -> Speeds:
    state, rest, out = codec.init(v, 0), torch.zeros_like(v), torch.empty_like(v)

    def encode() -> Any:
        return codec.encode(v, state) if codec.feedback == "none" else codec.encode_rest(v, rest, state)

    payload = encode()[0]
    return Speeds(_fastest(encode) / v.nbytes, _fastest(lambda: codec.decode(payload, out)) / v.nbytes)


def _fastest(action: Callable[[], Any]) -> float:
    """Seconds of the fastest of several repeats on one thread, after one that does not count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        action()
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            action()
            taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return min(taken)
