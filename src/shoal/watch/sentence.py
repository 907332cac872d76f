"""What a moment of a run shows, in two sentences: how fast it goes, and whether distribution pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.report.units import bytes_text, count_text, finite, percent_text, ratio_text, seconds_text
from shoal.report.verdicts import EVEN


@dataclass
class Standing:
    """The figures of all nodes together at one moment."""

    workers: int
    baseline: float | None = None  # samples/s of one worker
    virtual: bool = False
    samples: int = 0
    bytes_sent: int = 0
    rate: float = 0.0  # samples/s
    reporting: int = 0  # workers that have reported and train still
    lost: int = 0
    _losses: float = 0.0
    _with_loss: int = 0
    _computing: float = 0.0
    _waiting: float = 0.0
    _saved: float = 0.0
    _with_codec: int = 0
    _staleness: float = 0.0
    _with_staleness: int = 0

    def count(self, event: Mapping[str, Any], is_worker: bool) -> None:
        """Add a node's last report."""
        if (staleness := finite(event.get("staleness"))) is not None:
            self._staleness += staleness
            self._with_staleness += 1
        if not is_worker:
            return
        self.samples += int(event.get("samples") or 0)
        if event.get("state") == "dead":
            self.lost += 1
            return
        self.reporting += 1
        self.rate += finite(event.get("samples_per_second")) or 0.0
        self._computing += min(1.0, finite(event.get("compute_fraction")) or 0.0)
        self._waiting += min(1.0, finite(event.get("wait_fraction")) or 0.0)
        if (loss := finite(event.get("loss"))) is not None:
            self._losses += loss
            self._with_loss += 1
        if (saved := finite(event.get("saved_seconds"))) is not None:
            self._saved += saved
            self._with_codec += 1

    @property
    def loss(self) -> float | None:
        """The mean of the workers' last losses."""
        return self._losses / self._with_loss if self._with_loss else None

    @property
    def staleness(self) -> float | None:
        """How many versions behind updates have been on average."""
        return self._staleness / self._with_staleness if self._with_staleness else None

    @property
    def full_workers(self) -> float:
        """How many workers that never wait or send would compute as much."""
        return self._computing

    @property
    def waiting(self) -> float:
        """The share of the workers' time that they have waited."""
        return self._waiting / self.reporting if self.reporting else 0.0

    @property
    def saved_seconds(self) -> float | None:
        """What compression has saved a worker so far."""
        return self._saved / self._with_codec if self._with_codec else None


def speed(now: Standing) -> str:
    """How fast it goes and what becomes of the workers' time; empty before the first report."""
    if not now.reporting or not now.rate:
        return ""
    clock = " of virtual time" if now.virtual else ""
    who = "1 worker trains" if now.reporting == 1 else f"{now.reporting} workers train"
    parts = [f"{who} {count_text(now.rate)} samples/s{clock}."]
    if now.workers > 1:
        sent = f" and have sent {bytes_text(now.bytes_sent)}" if now.bytes_sent else ""
        parts.append(f"They have waited {percent_text(now.waiting)} of the time{sent}.")
    if now.lost:
        parts.append(f"{now.lost} of {now.workers} workers {'is' if now.lost == 1 else 'are'} lost.")
    return " ".join(parts)


def pays(now: Standing) -> str:
    """Whether distribution pays: against one worker that was measured, else the most that it can be."""
    if now.workers == 1 or not now.reporting or not now.rate:
        return ""
    saved = now.saved_seconds
    coded = "" if saved is None else f" Compression has {'saved' if saved >= 0 else 'cost'} a worker "
    coded += "" if saved is None else f"{seconds_text(abs(saved))} s so far."
    if now.baseline:
        ratio = now.rate / now.baseline
        word = "Yes" if ratio > 1 + EVEN else "No" if ratio < 1 - EVEN else "Hardly"
        return f"{word}, in speed: {ratio_text(ratio)} the samples/s of one worker.{coded}"
    if not now.full_workers:
        return coded.strip()
    return (
        f"At best {ratio_text(now.full_workers)} one worker: the workers compute "
        f"{percent_text(now.full_workers / now.reporting)} of the time. There is no run on one worker to "
        f"compare with.{coded}"
    )
