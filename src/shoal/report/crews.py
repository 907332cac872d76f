"""What a crew that grew has saved, against the same number of workers from the beginning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.report.reading import Record, group_of, is_resumed, is_virtual
from shoal.report.units import count_text, finite, percent_text

SAME = 0.005  # shares closer than this read as the same percentage


def legs_of(record: Record) -> Sequence[Mapping[str, Any]]:
    """The legs of a run whose crew grew, each with its workers and figures; none for any other run."""
    legs: Sequence[Mapping[str, Any]] = record.get("legs") or ()
    return legs if len(legs) > 1 else ()


def worker_seconds(record: Record) -> float:
    """Seconds of all workers together, those they waited included."""
    legs = legs_of(record)
    if legs:
        return sum(float(leg["workers"] * leg["seconds"]) for leg in legs)
    return float(record.get("workers") or 1) * (finite(record.get("seconds")) or 0.0)


def twin_of(record: Record, records: Iterable[Record]) -> Record | None:
    """The run that differs from this one only in that its workers were all there from the beginning."""
    if not legs_of(record) or is_resumed(record):
        return None
    whole = (other for other in records if not (legs_of(other) or is_resumed(other)))
    return next((other for other in whole if _alike(other) == _alike(record)), None)


def _alike(record: Record) -> tuple[Any, ...]:
    """What twins have in common: all settings but the crew, and the threads of a process."""
    config = {**(record.get("config") or {})}
    for name in ("crew", "run", "threads"):
        config.pop(name, None)
    return is_virtual(record), record.get("workers"), sorted((name, repr(v)) for name, v in config.items())


@dataclass(frozen=True)
class Saving:
    """What a run sent and took as a share of a full crew's, which was `measured` or else computed."""

    bytes: float
    worker_seconds: float | None
    measured: bool


def saving_of(record: Record, records: Iterable[Record]) -> Saving | None:
    """What the crew saved: against its twin, or else against bytes computed from its last leg.

    The last leg has all workers: what they sent per sample there, a full crew would have sent from the
    beginning. Not computed where the batch grows, as the bytes per sample fall with it. None where unknown.
    """
    legs, sent = legs_of(record), finite(record.get("bytes_sent"))
    if not legs or not sent:
        return None
    twin = twin_of(record, records)
    if twin is not None and (theirs := finite(twin.get("bytes_sent"))):
        return Saving(sent / theirs, worker_seconds(record) / worker_seconds(twin), measured=True)
    last, samples = legs[-1], sum(leg["samples"] for leg in legs)
    if (record.get("config") or {}).get("grow_batch") or not last["samples"] or not last["bytes_sent"]:
        return None
    return Saving(sent / (last["bytes_sent"] / last["samples"] * samples), None, measured=False)


def crew_size_text(record: Record) -> str:
    """8, 2-8 for a crew that grew, 2x4 for two workers of four processes."""
    legs, group = legs_of(record), group_of(record)
    if group > 1:
        return f"{count_text(record.get('workers'))}x{group}"
    return f"{legs[0]['workers']}-{legs[-1]['workers']}" if legs else count_text(record.get("workers"))


def crew_text(record: Record, records: Iterable[Record]) -> str:
    """How the crew grew and what that saved, as a part of a sentence; empty for other runs."""
    legs = legs_of(record)
    if not legs:
        return ""
    grew = ", ".join(f"{leg['workers']} from step {leg['step']}" for leg in legs[1:])
    began = f"began with {legs[0]['workers']} worker{'s' if legs[0]['workers'] > 1 else ''}, {grew}"
    saving = saving_of(record, records)
    if saving is None:
        return began
    full = f"{legs[-1]['workers']} workers from the beginning"
    if not saving.measured:
        return f"{began}: {_less(saving.bytes)} bytes than {full} (computed from its last leg)"
    seconds = _less(saving.worker_seconds) if saving.worker_seconds is not None else ""
    return f"{began}: {_less(saving.bytes)} bytes and {seconds} worker-seconds than {full}"


def _less(share: float | None) -> str:
    """'12 % fewer', '3 % more'."""
    if share is None or abs(1 - share) < SAME:
        return "no fewer"
    return f"{percent_text(abs(1 - share))} {'fewer' if share < 1 else 'more'}"
