"""The page of a proposal: what to take, timelines to point at, and the tables."""

from __future__ import annotations

from html import escape

from shoal.pipelines.proposal import Candidate, Proposal
from shoal.pipelines.split_tables import layers_text, sentences, tables_of
from shoal.pipelines.virtual_step import PipelineEvent
from shoal.report.charts import figure
from shoal.report.html import document
from shoal.report.html_table import html_table
from shoal.report.pipeline_chart import Pass, pipeline_chart, pipeline_legend
from shoal.report.svg import Axis
from shoal.report.units import bytes_text, count_text, percent_text, seconds_text, tick_text


def split_page(proposal: Proposal, name: str) -> str:
    """The whole page as text."""
    lead, *more = sentences(proposal)
    body = [f'<p class="lead">{escape(lead)}</p>', *(f"<p>{escape(sentence)}</p>" for sentence in more)]
    drawn = [c for c in proposal.candidates if c.timeline]
    if drawn:
        body.append(f"<h2>Timelines of a step</h2>{pipeline_legend()}")
        body += [timeline_figure(proposal, candidate) for candidate in drawn]
    body += [html_table(table.headers, table.rows, table.title) for table in tables_of(proposal)]
    body.append(f'<p class="remark">{escape(_assumptions(proposal))}</p>')
    parameters = sum(layer.parameters for layer in proposal.layers)
    facts = (
        f"{count_text(parameters)} parameters · {len(proposal.layers)} layers · {proposal.microbatches} "
        f"microbatches of {proposal.microbatch} samples · {_network(proposal)}"
    )
    return document(f"{name} on {proposal.stages} devices", facts, "\n".join(body))


def timeline_figure(proposal: Proposal, candidate: Candidate) -> str:
    """The timeline of a schedule, with its length and bubble as caption."""
    timeline = candidate.timeline
    assert timeline is not None
    bounds = proposal.chunk_bounds if len(timeline.stages) > proposal.stages else proposal.bounds
    assert bounds is not None

    def note(event: PipelineEvent) -> str:
        names = proposal.chain.names[bounds[event.stage] : bounds[event.stage + 1]]
        return (
            f"{event.kind} of microbatch {event.microbatch}, stage {event.stage} "
            f"(layers {layers_text(names)}): {seconds_text(1e3 * event.start)} to "
            f"{seconds_text(1e3 * event.end)} ms"
        )

    passes = [
        Pass(
            event.device,
            1e3 * event.start,
            1e3 * event.end,
            event.kind == "forward",
            str(event.microbatch),
            note(event),
        )
        for event in timeline.events
    ]
    rows = [f"device {d}, {bytes_text(timeline.memory(d))}" for d in range(timeline.devices)]
    drawn = pipeline_chart(candidate.name, rows, passes, Axis("milliseconds", tick_text))
    caption = f"{candidate.name}: {seconds_text(1e3 * candidate.seconds)} ms"
    return f'<div class="timeline">{figure(caption, drawn, f"bubble {percent_text(candidate.bubble)}")}</div>'


def _network(proposal: Proposal) -> str:
    network = proposal.network
    return f"{bytes_text(network.bandwidth)}/s, {seconds_text(1e3 * network.latency)} ms latency"


def _assumptions(proposal: Proposal) -> str:
    return (
        "Times of layers were measured on this machine with one microbatch, the shortest of several rounds; "
        "steps are simulated with them. The loss, the optimizer's own time and data loading are not "
        "counted. Data parallelism has the same batch; overlapped means an all-reduce that hides behind the "
        "backward pass as far as it can. Memory is that of the fullest device: parameters, gradients, "
        "optimizer, and the activations that the schedule keeps."
    )
