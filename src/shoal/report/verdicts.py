"""Verdicts: a sentence that sums each run up, and one for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shoal.report.crews import crew_text
from shoal.report.data_twin import layout_text
from shoal.report.goal import ACCURACY, LOSS, Goal, end_of, end_text, goal_of, highest_end, score_of
from shoal.report.reading import (
    BASELINE,
    Record,
    baseline_of,
    group_of,
    is_resumed,
    is_virtual,
    rank_name,
    run_name,
    run_names,
    speed_up,
    workers_of,
)
from shoal.report.units import (
    bytes_text,
    count_text,
    finite,
    percent_text,
    ratio_text,
    scaled_text,
    seconds_text,
)

EVEN = 0.05  # a speed within 5 % of one worker's is within the noise of a shared machine
COSTLY_POINTS = -1.0  # percentage points of accuracy: a faster run this far below gets a "but"
SAME_POINTS = 0.05  # accuracies closer than this round to the same tenth


def verdict(
    record: Record,
    baseline: Record | None = None,
    *,
    name: str | None = None,
    goal: Goal | None = None,
    crew: str = "",
    layout: str = "",
) -> str:
    """One sentence: did distribution pay, and where did the time go?

    `baseline` is the run on one worker. Without it, or for that run itself, the sentence only states the
    results. Speed is the time to the goal or, without one, samples per second. `name` replaces the run's own
    name if several runs share it. `crew` tells how its crew grew, `layout` how its model lay.
    """
    first = [_comparison(record, baseline, goal), layout, crew]
    parts = [*first, _rate(record), _waiting(record), _compression(record)]
    if is_resumed(record):
        parts.insert(0, "resumed; how long it took in all is not known")
    if _diverged(record):
        parts.insert(0, "diverged, its test loss is not finite")
    return f"{name or run_name(record)}: {'; '.join(part for part in parts if part)}."


def verdicts(records: Sequence[Record], target: float | None = None) -> list[str]:
    """The sentence of every run, compared with its own baseline."""
    named, goal = zip(records, run_names(records), strict=True), goal_of(records, target)
    return [
        verdict(
            record,
            baseline_of(record, records),
            name=name,
            goal=goal,
            crew=crew_text(record, records),
            layout=layout_text(record, records),
        )
        for record, name in named
    ]


def headline(records: Sequence[Record], target: float | None = None) -> str:
    """The run that was first at the goal and the one that ends best, in a sentence; empty for one run."""
    if len(records) < 2:
        return ""
    names, score, goal = run_names(records), score_of(records), goal_of(records, target)
    first, best, parts = None, highest_end(records), []
    if goal is not None and len({is_virtual(record) for record in records}) == 1:
        times = [(goal.seconds(record), index) for index, record in enumerate(records)]
        reached = [(seconds, index) for seconds, index in times if seconds is not None]
        if resumed := [name for name, record in zip(names, records, strict=True) if is_resumed(record)]:
            whose = " and ".join(resumed)
            parts.append(f"which run was first at {goal.text} is not known, as {whose} resumed")
        elif reached:
            seconds, first = min(reached)
            when = _clock(records[first], seconds)
            ahead = _ahead(goal, records[first], baseline_of(records[first], records))
            parts.append(f"{names[first]} was first at {goal.text}, after {when}{ahead}")
        else:
            parts.append(f"no run reached {goal.text}")
    if best is not None:
        what = "test accuracy" if score == ACCURACY else "test loss"
        end = end_text(records[best], score) + (" %" if score == ACCURACY else "")
        who = "it also" if best == first else names[best]
        parts.append(f"{who} ends with the best {what}, {end}")
    return f"{'; '.join(parts)}." if parts else ""


def _clock(record: Record, seconds: float) -> str:
    return f"{seconds_text(seconds)} {'virtual s' if is_virtual(record) else 's'}"


def _ahead(goal: Goal, record: Record, baseline: Record | None) -> str:
    if baseline is None or baseline is record:
        return ""
    ratio = goal.speed_up(record, baseline)
    return "" if ratio is None else f", {ratio_text(ratio)} as fast as one worker"


def _comparison(record: Record, baseline: Record | None, goal: Goal | None) -> str:
    if baseline is None or baseline is record or record.get("strategy") == BASELINE:
        missing = baseline is None and record.get("strategy") != BASELINE
        return _statement(record, goal, missing=missing)
    mine = None if goal is None else goal.seconds(record)
    if goal is not None and is_resumed(record):
        return _end(record, baseline, "one worker").removeprefix(", ")
    if goal is not None and mine is None:
        return f"did not reach {goal.text}{_end(record, baseline, 'one worker')}"
    if goal is not None and mine is not None and goal.seconds(baseline) is None:
        when = f"reached {goal.text} after {_clock(record, mine)}"
        if is_resumed(baseline):
            return f"{when}{_end(record, baseline, 'one worker')}; the run on one worker was resumed"
        return f"{when}, and one worker did not{_end(record, baseline)}"
    by_time = None if goal is None else goal.speed_up(record, baseline)
    by_samples = speed_up(record, baseline)
    if goal is not None and by_time is not None:
        words = (f"as fast as one worker to {goal.text}", f"as fast to {goal.text}")
        return _speed(by_time, *words, record, baseline)
    if by_samples is not None:
        return _speed(by_samples, "the samples/s of one worker", "its samples/s", record, baseline)
    return _statement(record, goal, missing=False)


def _speed(ratio: float, faster: str, slower: str, record: Record, baseline: Record) -> str:
    """How fast a run was against one worker, by the time to a goal or by samples, and how it ends."""
    text = ratio_text(ratio)
    if ratio < 1 - EVEN:
        end = _end(record, baseline)
        return f"slower than one worker, {text} {slower}{end}, so distribution did not pay"
    if ratio <= 1 + EVEN:
        return f"no faster than one worker, {text} {slower}{_end(record, baseline)}"
    return f"{text} {faster}{_end(record, baseline, costly=' but')}"


def _end(record: Record, baseline: Record, other: str = "it", costly: str = "") -> str:
    """How the run ends, against the run on one worker; `costly` begins an end that is much lower."""
    mine, theirs = end_of(record, ACCURACY), end_of(baseline, ACCURACY)
    if mine is not None and theirs is not None:
        points = mine.mean - theirs.mean
        if abs(points) < SAME_POINTS:
            return ", ends at the same accuracy"
        but = costly if points <= COSTLY_POINTS else ""
        within = " (within the noise)" if abs(points) <= mine.error + theirs.error else ""
        return f",{but} ends {abs(points):.1f} points {'above' if points > 0 else 'below'} {other}{within}"
    mine, theirs = end_of(record, LOSS), end_of(baseline, LOSS)
    if mine is None or theirs is None:
        return ""
    return f", ends at test loss {mine.mean:.3g} against {theirs.mean:.3g}"


def _statement(record: Record, goal: Goal | None, missing: bool) -> str:
    parts = []
    if end_of(record, ACCURACY) is not None:
        parts.append(f"{end_text(record, ACCURACY)} % test accuracy")
    elif (loss := end_of(record, LOSS)) is not None:
        parts.append(f"test loss {loss.mean:.3g}")
    if goal is not None and not is_resumed(record):
        seconds = goal.seconds(record)
        after = "never" if seconds is None else f"after {_clock(record, seconds)}"
        parts.append(f"{goal.text} {after}")
    took = f"{'virtual s' if is_virtual(record) else 's'}{' since then' if is_resumed(record) else ''}"
    workers = int(record.get("workers") or 1)
    parts.append(f"{seconds_text(record.get('seconds'))} {took} on {_workers(workers, group_of(record))}")
    parts.append(f"{count_text(record.get('samples_per_second'))} samples/s")
    text = ", ".join(parts)
    return f"{text}; no {BASELINE} run to compare it with" if missing and group_of(record) == 1 else text


def _workers(count: int, group: int) -> str:
    of = "" if group == 1 else f" of {group} processes"
    return f"one worker{of}" if count == 1 else f"{count} workers{of}"


def _rate(record: Record) -> str:
    """The learning rate, if it was scaled."""
    config = record.get("config") or {}
    rate, factor = finite(config.get("lr")), finite(config.get("lr_factor"))
    return scaled_text(rate, factor) if rate is not None and factor not in (None, 1.0) else ""


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
