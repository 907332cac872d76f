"""Reading finished runs: their names, the baseline of each, and a sentence that sums each up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.report.units import (
    bytes_text,
    count_text,
    decimal_text,
    finite,
    percent_text,
    ratio_text,
    seconds_text,
)

Record = Mapping[str, Any]
"""A finished run as plain values, as `write_json` stores it."""

BASELINE = "single"
EVEN = 0.05  # a speed within 5 % of one worker's is within the noise of a shared machine
COSTLY_POINTS = -1.0  # percentage points of accuracy: a faster run this far below gets a "but"
SAME_POINTS = 0.05  # accuracies closer than this round to the same tenth


def is_virtual(record: Record) -> bool:
    """Whether the seconds of this run are simulated."""
    return record.get("transport") == "sim"


def run_name(record: Record) -> str:
    """The strategy and its codec, if any: "bmuf + top_k(0.01)"."""
    codec = record.get("codec")
    strategy = str(record.get("strategy") or "?")
    return strategy if codec in (None, "", "none") else f"{strategy} + {codec}"


def run_names(records: Sequence[Record]) -> list[str]:
    """A name for each run. Runs with the same name also get the first settings in which they differ."""
    names = [run_name(record) for record in records]
    counts = Counter(names)
    settings = [_settings(record) for record in records]
    told: list[str] = []
    for name, mine in zip(names, settings, strict=True):
        if counts[name] == 1:
            told.append(name)
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
    """Samples per second divided by the baseline's; None if either is missing."""
    mine = finite(record.get("samples_per_second"))
    theirs = finite(baseline.get("samples_per_second")) if baseline is not None else None
    return mine / theirs if mine is not None and theirs else None


def verdict(record: Record, baseline: Record | None = None, *, name: str | None = None) -> str:
    """One sentence: did distribution pay, and where did the time go?

    `baseline` is the run on one worker. Without it, or for that run itself, the sentence only states the
    results. `name` replaces the run's own name if several runs share it.
    """
    told = (_comparison(record, baseline), _waiting(record), _compression(record))
    parts = [part for part in told if part]
    if _diverged(record):
        parts.insert(0, "diverged, its test loss is not finite")
    return f"{name or run_name(record)}: {'; '.join(parts)}."


def verdicts(records: Sequence[Record]) -> list[str]:
    """The sentence of every run, compared with its own baseline."""
    named = zip(records, run_names(records), strict=True)
    return [verdict(record, baseline_of(record, records), name=name) for record, name in named]


def headline(records: Sequence[Record]) -> str:
    """The most accurate and the fastest of several runs in one sentence; empty for a single run."""
    names = run_names(records)
    best = highest(records, "test_accuracy")
    fastest = highest(records, "samples_per_second")
    parts: list[str] = []
    if best is not None:
        accuracy = decimal_text(records[best]["test_accuracy"])
        parts.append(f"{names[best]} reached the highest test accuracy, {accuracy} %")
    if fastest is not None:
        speed = f"at {count_text(records[fastest]['samples_per_second'])} samples/s"
        again = "it was also" if fastest == best else f"{names[fastest]} was"
        parts.append(f"{again} the fastest {speed}" if parts else f"{names[fastest]} was the fastest {speed}")
    return f"{'; '.join(parts)}." if len(records) > 1 and parts else ""


def highest(records: Sequence[Record], key: str) -> int | None:
    """Index of the run with the highest finite value of `key`; of equal ones, the first."""
    values = [(finite(record.get(key)), -index) for index, record in enumerate(records)]
    known = [(value, index) for value, index in values if value is not None]
    return -max(known)[1] if known else None


def workers_of(record: Record) -> list[Mapping[str, Any]]:
    """The nodes of a run that train."""
    return [node for node in record.get("nodes") or () if node.get("role") != "server"]


def rank_name(record: Record, rank: int) -> str:
    """The name of a rank in messages. The ranks after the workers' are servers."""
    role = "worker" if 0 <= rank < _workers_at_first(record) else "server"
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
    return {
        **(record.get("config") or {}),
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


def _comparison(record: Record, baseline: Record | None) -> str:
    ratio = speed_up(record, baseline)
    if baseline is None or baseline is record or record.get("strategy") == BASELINE or ratio is None:
        return _statement(record, missing=baseline is None and record.get("strategy") != BASELINE)
    result = _result(record, baseline)
    if ratio < 1 - EVEN:
        return (
            f"slower than one worker, {ratio_text(ratio)} its samples/s{result}, so distribution did not pay"
        )
    if ratio <= 1 + EVEN:
        return f"no faster than one worker, {ratio_text(ratio)} its samples/s{result}"
    points = _points(record, baseline)
    but = " but" if points is not None and points <= COSTLY_POINTS else ""
    return f"{ratio_text(ratio)} the samples/s of one worker{result.replace(',', f',{but}', 1)}"


def _points(record: Record, baseline: Record) -> float | None:
    mine, theirs = finite(record.get("test_accuracy")), finite(baseline.get("test_accuracy"))
    return mine - theirs if mine is not None and theirs is not None else None


def _result(record: Record, baseline: Record) -> str:
    points = _points(record, baseline)
    if points is not None and abs(points) < SAME_POINTS:
        return ", at the same accuracy"
    if points is not None:
        return f", {abs(points):.1f} points {'above' if points > 0 else 'below'} it"
    mine, theirs = finite(record.get("test_loss")), finite(baseline.get("test_loss"))
    return f", test loss {mine:.3g} against {theirs:.3g}" if mine is not None and theirs is not None else ""


def _statement(record: Record, missing: bool) -> str:
    workers = int(record.get("workers") or 1)
    accuracy, loss = finite(record.get("test_accuracy")), finite(record.get("test_loss"))
    parts = []
    if accuracy is not None:
        parts.append(f"{accuracy:.2f} % test accuracy")
    elif loss is not None:
        parts.append(f"test loss {loss:.3g}")
    unit = "virtual s" if is_virtual(record) else "s"
    parts.append(f"{seconds_text(record.get('seconds'))} {unit} on {_workers(workers)}")
    parts.append(f"{count_text(record.get('samples_per_second'))} samples/s")
    text = ", ".join(parts)
    return f"{text}; no {BASELINE} run to compare it with" if missing else text


def _workers(count: int) -> str:
    return "one worker" if count == 1 else f"{count} workers"


def _waiting(record: Record) -> str:
    fraction = finite(record.get("wait_fraction"))
    if fraction is None or int(record.get("workers") or 1) < 2:
        return ""
    if fraction < 0.005:
        sent = finite(record.get("bytes_sent"))
        return "hardly any waiting" if sent is None else f"hardly any waiting, {bytes_text(sent)} sent"
    return f"{percent_text(fraction)} of the time waiting{_mostly_for(record)}"


def _compression(record: Record) -> str:
    """The seconds that the codec saved a worker, or cost it; empty without compression."""
    saved = finite(record.get("saved_seconds"))
    if saved is None:
        return ""
    if saved < 0:
        return f"compression did not pay: it cost a worker {seconds_text(-saved)} s more than it saved"
    return f"compression saved a worker about {seconds_text(saved)} s"


def _mostly_for(record: Record) -> str:
    waited: defaultdict[int, float] = defaultdict(float)
    for node in workers_of(record):
        for rank, seconds in (node.get("waited_for") or {}).items():
            waited[int(rank)] += finite(seconds) or 0.0
    if not waited or (total := sum(waited.values())) <= 0:
        return ""
    rank, most = max(waited.items(), key=lambda item: (item[1], -item[0]))
    peer = rank_name(record, rank)
    the = "the " if peer == "server" else ""
    return f", mostly for {the}{peer}" if most > total / 2 else ""


def _diverged(record: Record) -> bool:
    loss = record.get("test_loss")
    return isinstance(loss, float) and finite(loss) is None
