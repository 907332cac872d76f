"""Reading finished runs: their names, their nodes, and the run to compare each with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.report.units import finite

Record = Mapping[str, Any]
"""A finished run as plain values, as `write_json` stores it."""

BASELINE = "single"


def is_virtual(record: Record) -> bool:
    """Whether the seconds of this run are simulated."""
    return record.get("transport") == "sim"


def is_resumed(record: Record) -> bool:
    """Whether this run went on from a checkpoint: its times count from there, not from the beginning."""
    return any((finite(node.get("samples_before")) or 0.0) > 0 for node in workers_of(record))


def whole_seconds(record: Record) -> float | None:
    """How long the run took in all; None if it was resumed, as nobody knows what went before."""
    return None if is_resumed(record) else finite(record.get("seconds"))


def run_name(record: Record) -> str:
    """The strategy, its layout and its codec, if any: "bmuf, hybrid + top_k(0.01)"."""
    codec, layout = record.get("codec"), layout_of(record)
    strategy = ", ".join([str(record.get("strategy") or "?"), *([layout] if layout else [])])
    return strategy if codec in (None, "", "none") else f"{strategy} + {codec}"


def layout_of(record: Record) -> str:
    """How the model lay in the processes of a worker, without their number; empty for one process each."""
    word, _, options = str((record.get("config") or {}).get("layout") or "").partition(":")
    told = ",".join(option for option in options.split(",") if option and not option.startswith("group="))
    return f"{word}:{told}" if told else word


def group_of(record: Record) -> int:
    """Processes of a worker."""
    return int((record.get("config") or {}).get("group") or 1)


def run_names(records: Sequence[Record]) -> list[str]:
    """A name for each run. Of runs with the same name, those that were kept get the name of their folder.

    The others get the first settings in which they differ.
    """
    names = [run_name(record) for record in records]
    counts = Counter(names)
    settings = [_settings(record) for record in records]
    told: list[str] = []
    for name, mine in zip(names, settings, strict=True):
        if counts[name] == 1 or "run" in mine:
            told.append(str(mine["run"]) if counts[name] > 1 else name)
            continue
        alike = [other for twin, other in zip(names, settings, strict=True) if twin == name]
        differing = [key for key in mine if len({repr(other.get(key)) for other in alike}) > 1]
        told.append(
            f"{name} ({', '.join(f'{key}={mine[key]}' for key in differing[:2])})" if differing else name
        )
    return _numbered(told)


def baseline_of(record: Record, records: Iterable[Record]) -> Record | None:
    """The one-worker run to compare `record` with: the same task and the same kind of clock."""
    for other in records:
        same_clock = is_virtual(other) == is_virtual(record)
        if other.get("strategy") == BASELINE and same_clock and other.get("task") == record.get("task"):
            return other
    return None


def speed_up(record: Record, baseline: Record | None) -> float | None:
    """Samples per second divided by the baseline's; None if either is missing or has trained nothing."""
    mine = finite(record.get("samples_per_second"))
    theirs = finite(baseline.get("samples_per_second")) if baseline is not None else None
    return mine / theirs if mine and theirs else None


def workers_of(record: Record) -> list[Mapping[str, Any]]:
    """The nodes of a run that train."""
    return [node for node in record.get("nodes") or () if node.get("role") != "server"]


def rank_name(record: Record, rank: int) -> str:
    """The name of a rank in messages. The ranks after the workers' are servers."""
    places = int((record.get("config") or {}).get("max_workers") or 0)
    role = "worker" if 0 <= rank < max(places, _workers_at_first(record)) else "server"
    return node_name(record, {"role": role, "rank": rank})


def node_name(record: Record, node: Mapping[str, Any]) -> str:
    """The name of a node: "worker 3", "server" if it is the only one, else "server 1"."""
    rank, workers = int(node.get("rank") or 0), _workers_at_first(record)
    if node.get("role") != "server":
        return f"worker {rank}"
    servers = sum(other.get("role") == "server" for other in record.get("nodes") or ())
    # servers are counted from 0 whether or not their ranks go on from the workers'
    return f"server {rank - workers if rank >= workers else rank}" if servers > 1 else "server"


def _workers_at_first(record: Record) -> int:
    """Workers at the start of the run; `workers` does not count those that were killed."""
    config = record.get("config") or {}
    return int(config.get("workers") or record.get("workers") or 0)


def _settings(record: Record) -> dict[str, Any]:
    config = record.get("config") or {}
    return {
        **config,
        "crew": config.get("crew") or "full",
        "workers": record.get("workers"),
        "transport": record.get("transport"),
    }


def _numbered(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    counts = Counter(names)
    numbered: list[str] = []
    for name in names:
        seen[name] += 1
        numbered.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
    return numbered
