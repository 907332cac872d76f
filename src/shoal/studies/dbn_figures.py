"""Tables, claims and charts of the study dbn-speedup, with the published figures (Ma 2014)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.report.findings import Chart, ChartLine, Claim, Heading, Table
from shoal.studies.belief_stages import Net
from shoal.studies.study import time_to

Row = Mapping[str, Any]
FIXED_NODES, FIXED_TASKS, SERVER, REAL = "2 nodes", "2 tasks a node", "one server", "processes"
PUBLISHED = {
    FIXED_NODES: {
        4: (1413, 3.1552),
        8: (674, 6.6152),
        12: (405, 11.0152),
        16: (314, 14.2152),
        20: (318, 14.0152),
        24: (342, 13.0152),
        28: (428, 10.4152),
        32: (741, 6.0152),
    },
    FIXED_TASKS: {
        4: (1411, 3.1552),
        8: (728, 6.1254),
        12: (438, 10.1854),
        16: (337, 13.2054),
        20: (337, 13.2054),
        24: (365, 12.2054),
        28: (474, 9.4054),
        32: (856, 5.2054),
    },
}
"""Cores -> seconds until the accuracy exceeds 90 %, and the speed-up."""

AIMS = {16: 14.2, 32: 20.0}  # cores -> speed-up: the best of the paper, and more on more cores
HEADINGS = (
    Heading("cores", "cores", 0),
    Heading("place", "nodes x tasks"),
    Heading("pretraining", "layers s"),
    Heading("finetuning", "tuning s", 3),
    Heading("seconds", "sum s"),
    Heading("speed_up", "speed-up", 1),
    Heading("paper_speed_up", "paper's", 1),
    Heading("paper_seconds", "paper's s", 0),
    Heading("finetuning_speed_up", "tuning alone", 1),
    Heading("reconstruction", "error", 1),
    Heading("clock", "clock"),
)


def tabulate(
    table: str, place: tuple[int, int], net: Net | None, accuracy: float, clock: str
) -> dict[str, Any]:
    """The row of one network on `place` = (nodes, tasks per node).

    A diverged network (None) has no figures; one that never reaches the accuracy has no times.
    """
    cores = place[0] * place[1]
    paper = PUBLISHED.get(table, {}).get(cores, (None, None))
    beside = f"{place[0]} x {place[1]}"
    line = {"table": table, "cores": cores, "place": beside, "clock": clock}
    line |= {"paper_seconds": paper[0], "paper_speed_up": paper[1]}
    if net is None:
        keys = ("pretraining", "finetuning", "seconds", "reconstruction")
        return {**line, **dict.fromkeys(keys)}
    finetuning = time_to(accuracy, net.finetuning.curve)
    return {
        **line,
        "pretraining": net.pretraining_seconds,
        "finetuning": finetuning,
        "seconds": None if finetuning is None else net.pretraining_seconds + finetuning,
        "reconstruction": net.reconstruction,
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add speed-ups relative to the first row, which is one worker."""
    for key, whole in (("speed_up", "seconds"), ("finetuning_speed_up", "finetuning")):
        for line in rows:
            line[key] = rows[0][whole] / line[whole] if rows[0][whole] and line[whole] else None
    return rows


def of_table(rows: Sequence[Row], table: str) -> dict[int, Row]:
    """The rows of one table by their number of cores."""
    return {row["cores"]: row for row in rows if row["table"] == table}


def tables(rows: Sequence[Row], ours: str) -> Iterator[Table]:
    """One table for each set of rows present."""
    titles = {
        FIXED_NODES: f"2 nodes: {ours}",
        FIXED_TASKS: f"2 tasks a node: {ours}",
        SERVER: "The paper's method, asynchronous SGD with one server: 2 nodes",
        REAL: f"Processes on this machine, one thread each: {ours}",
    }
    for table, title in titles.items():
        own = list(of_table(rows, table).values())
        if own:
            empty = {
                key for key in ("paper_seconds", "paper_speed_up") if all(row[key] is None for row in own)
            }
            yield Table(title, [heading for heading in HEADINGS if heading.key not in empty], own)


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Our aims and the observations of the paper, for the tables present."""
    nodes, tasks = of_table(rows, FIXED_NODES), of_table(rows, FIXED_TASKS)
    for table, own in ((FIXED_NODES, nodes), (FIXED_TASKS, tasks)):
        for cores, aim in AIMS.items():
            if cores in own:
                yield enough(table, own[cores], aim)
        if own:
            yield no_collapse(table, own)
    if nodes and tasks:
        yield dearer_between(nodes, tasks)
    if server := of_table(rows, SERVER):
        yield held_up(server, nodes)
    if real := of_table(rows, REAL):
        yield no_collapse(REAL, real)


def enough(table: str, row: Row, aim: float) -> Claim:
    """The speed-up reaches the aim."""
    said = times(row["speed_up"])
    sentence = f"{table}: {said} times as fast on {row['cores']} cores (aim {aim:g}"
    sentence += f", paper {row['paper_speed_up']:.1f})" if row["paper_speed_up"] else ")"
    return Claim(sentence, (row["speed_up"] or 0.0) >= aim)


def no_collapse(table: str, own: Mapping[int, Row]) -> Claim:
    """The largest number of cores is the fastest; in the paper 16 cores are."""
    said = ", ".join(f"{times(row['speed_up'])} on {cores}" for cores, row in own.items())
    best = max(own.values(), key=lambda row: row["speed_up"] or 0.0)
    return Claim(f"{table}: the largest number of cores is the fastest: {said}", best is own[max(own)])


def dearer_between(nodes: Mapping[int, Row], tasks: Mapping[int, Row]) -> Claim:
    """The same number of cores is faster on fewer nodes."""
    both = [(nodes[cores], tasks[cores]) for cores in nodes if cores in tasks and cores > 4]
    ratios = [b["seconds"] / a["seconds"] for a, b in both if a["seconds"] and b["seconds"]]
    said = f"{min(ratios):.2f} to {max(ratios):.2f} times as long" if ratios else "not seen"
    sentence = f"messages between nodes cost more than within: 2 tasks a node take {said}"
    return Claim(sentence, bool(ratios) and len(ratios) == len(both) and min(ratios) > 1)


def held_up(server: Mapping[int, Row], ours: Mapping[int, Row]) -> Claim:
    """The paper's method falls behind on the largest number of cores, as it did in the paper."""
    last = max(server)
    row, other = server[last], ours[last]["speed_up"] if last in ours else None
    said = "never reached" if row["speed_up"] is None else f"{times(row['speed_up'])} times as fast"
    return Claim(
        f"one server is the bottleneck of {last} cores: {said}, {times(other)} without",
        row["speed_up"] is not None and other is not None and row["speed_up"] < other / 2,
    )


def times(value: float | None) -> str:
    """A speed-up as text."""
    return "never" if value is None else f"{value:.1f}"


def charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Speed-up and time over cores; the figures of the paper are dashed."""
    for key, title, y in (("speed_up", "Speed-up", "times one worker"), ("seconds", "Time", "seconds")):
        lines = []
        for table in (FIXED_NODES, FIXED_TASKS, SERVER, REAL):
            own = of_table(rows, table).values()
            clock = "real" if table == REAL else "virtual"
            lines.append(ChartLine(f"{table}, {clock}", points(own, key)))
            lines.append(ChartLine(f"{table}, paper", points(own, f"paper_{key}"), published=True))
        yield Chart(title, "cores", y, [line for line in lines if line.points], log_y=key == "seconds")


def points(own: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """The known values of a column, over cores."""
    return [(row["cores"], row[key]) for row in own if row[key] is not None]
