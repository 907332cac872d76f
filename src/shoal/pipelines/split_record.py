"""A proposal as plain values, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

from shoal.pipelines.partition import stage_costs
from shoal.pipelines.proposal import Candidate, Proposal
from shoal.pipelines.virtual_step import PipelineTimeline


def split_record(proposal: Proposal) -> dict[str, Any]:
    """Layers, stages, candidates with their timelines, fully-connected layers, and the fastest way."""
    names, best = proposal.chain.names, proposal.best
    return {
        "stages": [
            {"layers": list(names[first:after]), **asdict(cost)}
            for (first, after), cost in zip(
                pairwise(proposal.bounds), stage_costs(proposal.layers, proposal.bounds), strict=True
            )
        ],
        "split_points": [names[first] for first in proposal.bounds[1:-1]],
        "chunk_split_points": [names[first] for first in (proposal.chunk_bounds or ())[1:-1]],
        "microbatches": proposal.microbatches,
        "microbatch_samples": proposal.microbatch,
        "network": {"latency": proposal.network.latency, "bandwidth": proposal.network.bandwidth},
        "memory": proposal.memory,
        "tied": proposal.tied,
        "layers": [asdict(layer) for layer in proposal.layers],
        "candidates": [_candidate(candidate) for candidate in proposal.candidates],
        "all_reduce": proposal.data_parallel.algorithm,
        "linears": [{**asdict(one), "best": one.best, "pays": one.pays} for one in proposal.linears],
        "recommended": best.name if best else None,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "schedule": candidate.word or None,
        "seconds": candidate.seconds,
        "bubble": candidate.bubble,
        "memory": candidate.memory,
        "bytes_sent": candidate.sent,
        "refusal": candidate.refusal,
        "timeline": candidate.timeline and _timeline(candidate.timeline),
    }


def _timeline(timeline: PipelineTimeline) -> dict[str, Any]:
    return {
        "events": [asdict(event) for event in timeline.events],
        "in_flight": [timeline.in_flight(stage) for stage in range(len(timeline.stages))],
        "memory": [timeline.memory(device) for device in range(timeline.devices)],
        "link_bytes": {f"{src}-{dst}": nbytes for (src, dst), nbytes in timeline.link_bytes.items()},
    }
