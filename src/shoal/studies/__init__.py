"""Studies: the published tables that Shoal makes again, by name: `shoal reproduce NAME`.

study.py           what a study is, and where its runs are made
calibration.py     what a step costs on this machine, for virtual time
clockwork.py       a task that computes nothing, for runs that only keep time
block_momentum.py  what the studies of block momentum share
belief_stages.py   the runs that dbn-speedup is made of
dbn_figures.py     its tables, claims and pictures
"""

from __future__ import annotations

from shoal.core.catalogue import Catalogue
from shoal.studies.allreduce_cost import AllreduceCost
from shoal.studies.bmuf_time import BmufTime
from shoal.studies.bmuf_wer import BmufWer
from shoal.studies.compression import Compression
from shoal.studies.dbn_speedup import DbnSpeedup
from shoal.studies.downpour_time import DownpourTime
from shoal.studies.staleness import Staleness
from shoal.studies.study import Study

STUDIES: Catalogue[Study] = Catalogue(
    "study",
    {
        "allreduce-cost": AllreduceCost,
        "bmuf-time": BmufTime,
        "bmuf-wer": BmufWer,
        "compression": Compression,
        "dbn-speedup": DbnSpeedup,
        "downpour-time-to-accuracy": DownpourTime,
        "staleness": Staleness,
    },
)

__all__ = ["STUDIES"]
