"""One node of a run on a host of its own: python -m shoal.studies.host_node FOLDER RANK ADDRESS WORDS.

WORDS are the settings of the run as JSON. The nodes meet in FOLDER, talk over gRPC, and leave their models
there; the report of this one is the last line that it prints. `host_runs` starts them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields, replace

import torch

from shoal.launch.control import Control, leave_with_parent
from shoal.launch.join import Access
from shoal.runs.node_process import live
from shoal.runs.plan import Plan
from shoal.runs.plan_words import plan_of


@dataclass(frozen=True)
class FixedCrew(Plan):
    """The settings of a run in which nobody comes or goes: it has no keeper, and workers talk directly."""

    @property
    def is_elastic(self) -> bool:
        return False

    @classmethod
    def of(cls, plan: Plan) -> FixedCrew:
        """The same settings with a fixed crew."""
        return cls(**{part.name: getattr(plan, part.name) for part in fields(plan)})


def main() -> None:
    """Be the node that the command line describes."""
    leave_with_parent()
    torch.set_num_threads(1)
    folder, rank, address, words = sys.argv[1:]
    plan = FixedCrew.of(plan_of(json.loads(words)))
    plan = replace(plan, access=Access(listen=address, insecure=True))
    print(json.dumps(live(plan, (int(rank), 0), 0, Control(), folder)), flush=True)


if __name__ == "__main__":
    main()
