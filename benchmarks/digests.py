"""Fingerprints of what is computed: the final weights and the trace of every strategy, codec and collective.

A change that must not change any result is checked by running this before it and after it on one machine:

    python benchmarks/digests.py --save before.json
    python benchmarks/digests.py --check before.json

Every strategy runs in virtual time, where even the trace of all messages is fixed by the seed. Strategies
whose result does not depend on timing run on real processes as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.codecs import CODECS
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Setting

OPTIONS: dict[str, dict[str, Any]] = {  # short periods, so that a few steps go through every phase
    "local": {"period": 3},
    "post_local": {"period": 3, "switch": 4},
    "bmuf": {"period": 3},
    "slowmo": {"period": 3},
    "diloco": {"period": 3},
    "streaming_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "sparse_loco": {"period": 3, "density": 0.25},
    "demo": {"kept": 8},
    "async_diloco": {"period": 3},
    "decoupled_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "halos": {"period": 3, "exchange": 2},
    "muloco": {"period": 3},
    "noloco": {"period": 3},
    "easgd": {"period": 2},
    "eamsgd": {"period": 2},
}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [  # label, strategy, options
    ("easgd synchronous", "easgd", {"synchronous": True, "period": 2}),
    ("bmuf blocks", "bmuf", {"blocks": 3}),
    ("downpour overlap", "downpour", {"overlap": True, "n_fetch": 3, "n_push": 2}),
    ("downpour adagrad", "downpour", {"optimizer": "adagrad", "warm_start": 4}),
    ("softsync wait", "softsync", {"wait": True, "collect": 2}),
    ("sync_server backup", "sync_server", {"backup": 1}),
    ("hierarchical collect", "hierarchical", {"collect": 2}),
    ("dcasgd constant", "dcasgd", {"adaptive": False}),
    ("sgp overlap", "sgp", {"overlap": 1}),
    ("dpsgd later", "dpsgd", {"overlap": False}),
    ("gossip no help", "gossip", {"help": False}),
]
ON_PROCESSES = [  # their results do not depend on who comes first
    *("single", "sync", "local", "post_local", "bmuf", "slowmo", "diloco", "streaming_diloco", "ensemble"),
    *("muloco", "sparse_loco", "demo", "noloco", "dpsgd", "gossipgrad", "choco", "sgp"),
]
COLLECTIVES = ("stripes", "tree", "butterfly", "ring", "rabenseifner")
NETWORK = shoal.Network.parse("1Gbit,100us")
COMPUTE = shoal.Compute.parse("20ms,30%")


def fingerprint(result: shoal.Result) -> str:
    """The weights to the last bit and, in virtual time, every message."""
    digest = hashlib.blake2b(digest_size=12)
    assert result.model is not None
    for name, tensor in result.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{digest.hexdigest()} {result.digest or ''}".strip()


def virtual(strategy: str, options: dict[str, Any] | None = None, **settings: Any) -> shoal.Result:
    """A run of four uneven workers in virtual time."""
    made = STRATEGIES.make(strategy, **(OPTIONS.get(strategy, {}) if options is None else options))
    settings = {"workers": 1 if strategy == "single" else 4, "batch": 64, "epochs": 2, **settings}
    return shoal.run("digits", made, seed=3, transport="sim", network=NETWORK, compute=COMPUTE, **settings)


def real(strategy: str, transport: str) -> shoal.Result:
    """The same work in real processes."""
    workers = 1 if strategy == "single" else 4
    made = STRATEGIES.make(strategy, **OPTIONS.get(strategy, {}))
    return shoal.run("digits", made, workers=workers, batch=64, seed=3, transport=transport)


def cases() -> Iterator[tuple[str, Callable[[], shoal.Result]]]:
    """What is fingerprinted, by name."""
    for word in STRATEGIES:
        yield f"virtual {word}", partial(virtual, word)
        if STRATEGIES.make(word).servers:
            crash = shoal.Faults().crash(1, step=3)
            yield f"virtual {word}, a crash", partial(virtual, word, faults=crash)
            if word != "hogwild":
                yield f"virtual {word}, 2 shards", partial(virtual, word, servers=2)
    for label, word, options in VARIANTS:
        yield f"virtual {label}", partial(virtual, word, options)
    for codec in CODECS:
        yield f"virtual sync + {codec}", partial(virtual, "sync", codec=codec)
        for word in ("bmuf", "asgd", "choco"):
            if suits(word, codec):
                yield f"virtual {word} + {codec}", partial(virtual, word, codec=codec)
    yield "virtual sync + ternary:shared=true", partial(virtual, "sync", codec="ternary:shared=true")
    for word in COLLECTIVES:
        yield f"virtual sync by {word}", partial(virtual, "sync", collective=word, workers=5)
    yield (
        "virtual sync by sparse_doubling",
        partial(virtual, "sync", codec="top_k", collective="sparse_doubling", workers=5),
    )
    yield "virtual sync balanced", partial(virtual, "sync", balance=True)
    for word in ON_PROCESSES:
        yield f"processes {word}", partial(real, word, "processes")
    for word in ("sync", "bmuf"):
        yield f"gloo {word}", partial(real, word, "gloo")


def suits(strategy: str, codec: str) -> bool:
    """Whether the strategy takes the codec."""
    try:
        STRATEGIES.make(strategy).check(Setting(4, CODECS.read(codec)))
    except ValueError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", type=Path, help="write the fingerprints to this file")
    parser.add_argument("--check", type=Path, help="compare with the fingerprints in this file")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before: dict[str, str] = json.loads(options.check.read_text()) if options.check else {}
    taken: dict[str, str] = {}
    for name, case in cases():
        if options.only in name:
            try:
                taken[name] = fingerprint(case())
            except (shoal.ShoalError, ValueError) as refused:
                taken[name] = f"{type(refused).__name__}"
            changed = name in before and before[name] != taken[name]
            print(f"{'CHANGED ' if changed else ''}{name}: {taken[name]}", flush=True)
    if options.save:
        options.save.write_text(json.dumps(taken, indent=1) + "\n")
    if before:
        different = [name for name in taken if before.get(name) != taken[name]]
        print(f"{len(taken) - len(different)} of {len(taken)} are as they were")
        raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
