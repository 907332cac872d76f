"""What laying a model out over a group of processes brought, against whole models in as many processes."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.report.reading import Record, group_of, speed_up, workers_of
from shoal.report.units import finite, ratio_text


def data_twin(record: Record, records: Iterable[Record]) -> Record | None:
    """The run of the same strategy on as many processes, each of which had the whole model."""
    if group_of(record) == 1:
        return None
    return next(
        (other for other in records if group_of(other) == 1 and _alike(other) == _alike(record)), None
    )


def _alike(record: Record) -> tuple[object, ...]:
    """What twins have in common."""
    processes = int(record.get("workers") or 0) * group_of(record)
    return *(record.get(name) for name in ("task", "strategy", "codec", "transport")), processes


def layout_text(record: Record, records: Iterable[Record]) -> str:
    """How the model lay, and its speed and memory against its twin's; empty for whole models."""
    if group_of(record) == 1:
        return ""
    lies = next((str(node["lies"]) for node in workers_of(record) if node.get("lies")), "")
    twin = data_twin(record, records)
    ratio, figures = speed_up(record, twin), []
    if twin is not None and ratio is not None:
        figures.append(f"{ratio_text(ratio)} the samples/s of whole models")
    mine, theirs = finite(record.get("memory")), finite((twin or {}).get("memory"))
    if mine and theirs:
        figures.append(f"{ratio_text(mine / theirs)} the memory of a process")
    return ": ".join(part for part in (lies, " and ".join(figures)) if part)
