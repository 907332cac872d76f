"""Studies: the tables of `shoal reproduce NAME`: published ones, and plans beside real runs.

study.py           what a study is, and where its runs are made
clockwork.py       a task that computes nothing, for runs that only keep time
block_momentum.py  what the studies of block momentum share
belief_stages.py   the runs that dbn-speedup is made of
dbn_figures.py     its tables, claims and pictures
planned_programs.py, host_runs.py, host_node.py, shaped_hosts.py, busy_neighbour.py, picture_loop.py,
recurrent_loop.py  what the study of plans trains, and where
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.studies.study import Study

STUDIES: Catalogue[Study] = Catalogue(
    "study",
    {
        "allreduce-cost": "shoal.studies.allreduce_cost:AllreduceCost",
        "bmuf-time": "shoal.studies.bmuf_time:BmufTime",
        "bmuf-wer": "shoal.studies.bmuf_wer:BmufWer",
        "compression": "shoal.studies.compression:Compression",
        "dbn-speedup": "shoal.studies.dbn_speedup:DbnSpeedup",
        "downpour-time-to-accuracy": "shoal.studies.downpour_time:DownpourTime",
        "plan": "shoal.studies.planned_runs:PlannedRuns",
        "staleness": "shoal.studies.staleness:Staleness",
    },
)

__all__ = ["STUDIES"]
