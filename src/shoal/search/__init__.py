"""Search over many models: hyper-parameters and architectures. Each trial is a Shoal run.

search_run           shoal.search.run(task, space, "pbt")
space, ranges        hyper-parameters and their ranges         architectures   layers and cells to choose from
searcher             what every method answers, without clock, process or file
random_search  successive_halving  population  evolution  hierarchical_evolution  swarm   one a file
optuna_sampler       a sampler of Optuna as a method
controller           asks, trains, writes down                 search_journal  what a search resumes from
slots, search_folder the processes of trials                   trial_plan      the run of a trial
inheritance          a trial goes on from another's checkpoint
search_result, search_page, pictures, search_display   what was found: figures, table, page, progress

A file is imported when its method is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.search.searcher import SearchMethod

METHODS: Catalogue[SearchMethod] = Catalogue(
    "method",
    {
        "random": "shoal.search.random_search:RandomSearch",
        "asha": "shoal.search.successive_halving:ASHA",
        "pbt": "shoal.search.population:PBT",
        "evolution": "shoal.search.evolution:Evolution",
        "hierarchical": "shoal.search.hierarchical_evolution:HierarchicalEvolution",
        "pso": "shoal.search.swarm:PSO",
        "optuna": "shoal.search.optuna_sampler:OptunaSearch",
    },
    checks=("shoal.core.limits",),
)
"""The methods by name."""

_OTHERS = {
    "Cells": "shoal.search.architectures",
    "Choice": "shoal.search.ranges",
    "Interval": "shoal.search.ranges",
    "Layers": "shoal.search.architectures",
    "SearchResult": "shoal.search.search_result",
    "Space": "shoal.search.space",
    "run": "shoal.search.search_run",
}


def __getattr__(name: str) -> Any:
    """`shoal.search.run` and `from shoal.search import PBT` import what they need alone."""
    if name in _OTHERS:
        from importlib import import_module

        return getattr(import_module(_OTHERS[name]), name)
    return METHODS.class_called(name)
