"""The tables and sentences of a proposal, the same on a terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from shoal.pipelines.linear_layers import LinearSplit
from shoal.pipelines.partition import stage_costs
from shoal.pipelines.proposal import Candidate, Proposal
from shoal.pipelines.virtual_step import PipelineTimeline
from shoal.report.findings import print_whole
from shoal.report.units import MISSING, bytes_text, count_text, percent_text, seconds_text

CELLS = 64  # characters of a timeline on a terminal
FORWARD_CELL, BACKWARD_CELL, BUBBLE_CELL = "▒", "█", "·"


@dataclass(frozen=True)
class SplitTable:
    """A title, headers, and rows of text."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(proposal: Proposal) -> list[SplitTable]:
    """Stages, ways to run a step, and fully-connected layers if there are any."""
    found = [_stages(proposal), _candidates(proposal)]
    return [*found, _linears(proposal)] if proposal.linears and proposal.stages > 1 else found


def _milliseconds(seconds: float) -> str:
    return seconds_text(1e3 * seconds)


def layers_text(names: Sequence[str]) -> str:
    """The layers of a stage: the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _stages(proposal: Proposal) -> SplitTable:
    rows = []
    costs = stage_costs(proposal.layers, proposal.bounds)
    for stage, ((first, after), cost) in enumerate(zip(pairwise(proposal.bounds), costs, strict=True)):
        rows.append(
            [
                str(stage),
                layers_text(proposal.chain.names[first:after]),
                count_text(sum(layer.parameters for layer in proposal.layers[first:after])),
                _milliseconds(cost.forward),
                _milliseconds(cost.backward),
                bytes_text(cost.output_bytes) if cost.output_bytes else MISSING,
                bytes_text(cost.state_bytes),
                bytes_text(cost.activation_bytes),
            ]
        )
    title = f"Stages: times, activations and bytes of one microbatch of {proposal.microbatch} samples"
    headers = ["stage", "layers", "parameters", "forward ms", "backward ms", "sends", "state", "activations"]
    return SplitTable(title, headers, rows)


def _candidates(proposal: Proposal) -> SplitTable:
    rows = [
        [
            one.name,
            _milliseconds(one.seconds),
            percent_text(one.bubble),
            bytes_text(one.sent),
            bytes_text(one.memory),
            one.refusal or ("fastest" if one is proposal.best else ""),
        ]
        for one in proposal.candidates
    ]
    title = f"A step of {proposal.microbatches} microbatches on {proposal.stages} devices, in virtual time"
    return SplitTable(title, ["step", "ms", "bubble", "a device sends", "memory", "note"], rows)


def _linears(proposal: Proposal) -> SplitTable:
    alike: dict[tuple[int, int, int, bool], list[LinearSplit]] = {}
    for one in proposal.linears:
        shape = one.shape
        alike.setdefault((shape.inputs, shape.outputs, one.samples, shape.shared), []).append(one)
    rows = [
        [
            _listed(list(dict.fromkeys(one.shape.name for one in same))),
            f"{inputs:,} x {outputs:,}",
            bytes_text(same[0].data_parallel),
            bytes_text(same[0].columns),
            bytes_text(same[0].rows),
            f"split by {same[0].best}" if same[0].pays else f"data-parallel{', shared' * shared}",
        ]
        for (inputs, outputs, _, shared), same in alike.items()
    ]
    title = "Fully-connected layers: bytes that a device sends in a step, for one layer of each size"
    return SplitTable(title, ["layer", "inputs x outputs", "data-parallel", "columns", "rows", "note"], rows)


def sentences(proposal: Proposal) -> list[str]:
    """What to do, and why."""
    told = [_recommendation(proposal)]
    told += _hybrid(proposal)
    told += [
        f"Stages {' and '.join(map(str, stages))} share {name!r}: its gradients are added up after each step."
        for name, stages in proposal.tied.items()
    ]
    norms = [
        name for name, module in proposal.chain.model.named_modules() if "BatchNorm" in type(module).__name__
    ]
    if norms:
        told.append(
            f"Batch normalisation ({norms[0]}) sees microbatches of {proposal.microbatch} samples, not the "
            "whole batch."
        )
    return told


def _recommendation(proposal: Proposal) -> str:
    best = proposal.best
    if best is None:
        return "Nothing fits: " + "; ".join(f"{c.name}: {c.refusal}" for c in proposal.candidates) + "."
    others = [c for c in proposal.candidates if bool(c.word) != bool(best.word)]
    other = min([c for c in others if c.refusal is None] or others, key=lambda c: c.seconds)
    parallel = proposal.data_parallel
    what, kind = (f"a pipeline, {best.name}", "without a") if best.word else (best.name, "with a")
    return (
        f"Take {what}: {_milliseconds(best.seconds)} ms a step. The best {kind} pipeline, {other.name}: "
        f"{other.refusal or f'{_milliseconds(other.seconds)} ms'}. The all-reduce of all gradients takes "
        f"{_milliseconds(parallel.all_reduce)} ms ({parallel.algorithm})."
    )


def _hybrid(proposal: Proposal) -> list[str]:
    """Krizhevsky's advice for the fully-connected layers that are worth it."""
    worth = [one for one in proposal.linears if one.pays]
    if not worth:
        return []
    largest = max(worth, key=_saved)
    split = sum(one.shape.parameter_bytes for one in worth)
    rest = sum(layer.parameter_bytes for layer in proposal.layers) - split
    return [
        f"Hybrid: split {_listed([one.shape.name for one in worth])} between the devices "
        f"({bytes_text(split)} of parameters) and keep the rest ({bytes_text(rest)}) data-parallel. For "
        f"{largest.shape.name!r}, by {largest.best}, a device then sends {bytes_text(largest.cheapest)} a "
        f"step instead of {bytes_text(largest.data_parallel)}."
    ]


def _saved(one: LinearSplit) -> float:
    return one.data_parallel - one.cheapest


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def timeline_lines(timeline: PipelineTimeline, cells: int = CELLS) -> list[str]:
    """A line for each device; a cell shows what the device does in the middle of its time."""
    lines = []
    for device in range(timeline.devices):
        own = [event for event in timeline.events if event.device == device]
        line = []
        for cell in range(cells):
            now = (cell + 0.5) / cells * timeline.seconds
            kind = next((event.kind for event in own if event.start <= now < event.end), None)
            line.append({"forward": FORWARD_CELL, "backward": BACKWARD_CELL, None: BUBBLE_CELL}[kind])
        lines.append("".join(line))
    return lines


def show_split(proposal: Proposal, console: Console) -> None:
    """Print tables, timelines and advice."""
    for table in tables_of(proposal):
        console.print(Text(f"\n{table.title}", "bold"))
        print_whole(_grid(table), console)
    drawn = [candidate for candidate in proposal.candidates if candidate.timeline]
    if drawn:
        console.print(
            Text(
                f"\nTimelines: {FORWARD_CELL} forward  {BACKWARD_CELL} backward  {BUBBLE_CELL} bubble", "bold"
            )
        )
    for candidate in drawn:
        _show_timeline(candidate, console)
    console.print()
    for sentence in sentences(proposal):
        console.print(sentence, markup=False, highlight=False)


def _show_timeline(candidate: Candidate, console: Console) -> None:
    assert candidate.timeline is not None
    console.print(f"{candidate.name}, {_milliseconds(candidate.seconds)} ms", markup=False)
    for device, line in enumerate(timeline_lines(candidate.timeline)):
        console.print(f"  device {device}  {line}", markup=False, soft_wrap=True)


def _grid(table: SplitTable) -> RichTable:
    grid = RichTable(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False
    )
    for index, header in enumerate(table.headers):
        words = header in ("stage", "layers", "step", "layer", "note")
        widest = max(len(text) for text in (header, *(row[index] for row in table.rows)))
        grid.add_column(header, justify="left" if words else "right", no_wrap=True, min_width=widest)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def split_text(proposal: Proposal, width: int = 100) -> str:
    """All of it as text."""
    out = StringIO()
    show_split(proposal, Console(file=out, width=width, highlight=False))
    return out.getvalue().strip("\n")
