"""Layouts: how a model lies in the processes of a worker. A file is imported when its layout is asked for.

model_layout      ModelLayout: what every layout answers
whole_model       all of it in one process: plain data parallelism
cut_layers        fully connected layers cut by columns, by rows, or by both in turn
border            hybrid: data-parallel up to a border, cut layers after it
branch_per_input  one process for each input of a network with branches
stages            a pipeline
group_part        GroupPart: what one process then holds and computes
inner_traffic     the bytes that the processes of a group send each other in a step
assembly          the whole model again, from the parts of all processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.layouts.model_layout import ModelLayout

LAYOUTS: Catalogue[ModelLayout] = Catalogue(
    "layout",
    {
        "data": "shoal.layouts.whole_model:DataParallel",
        "columns": "shoal.layouts.cut_layers:CutColumns",
        "rows": "shoal.layouts.cut_layers:CutRows",
        "tensor": "shoal.layouts.cut_layers:CutInTurn",
        "hybrid": "shoal.layouts.border:HybridLayout",
        "branches": "shoal.layouts.branch_per_input:BranchesLayout",
        "pipeline": "shoal.layouts.stages:PipelineLayout",
    },
    checks=("shoal.core.limits", "shoal.layouts.split_words"),
)

__all__ = ["LAYOUTS"]
