"""Mutants of means that are taken a block late while workers come and go; see `membership_mutants`."""

from __future__ import annotations

import pytest

from shoal.engine.averages import Repeatable
from shoal.engine.edges import Edges
from shoal.vocabulary.node import Node


def only_the_last_block_is_dealt_again(patch: pytest.MonkeyPatch) -> None:
    undone = Edges._undone

    def too_little(self):
        began = self.blocks[-2]
        return {place: range(began, steps.stop) for place, steps in undone(self).items()}

    patch.setattr(Edges, "_undone", too_little)


def a_block_that_was_merged_with_the_dead_is_dealt_again(patch: pytest.MonkeyPatch) -> None:
    undone = Edges._undone

    def too_much(self):
        return {place: range(self.block_began, steps.stop) for place, steps in undone(self).items()}

    patch.setattr(Edges, "_undone", too_much)


def what_is_under_way_is_not_begun_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Repeatable, "_is_valid", True)


def a_joiner_counts_averages_from_the_start(patch: pytest.MonkeyPatch) -> None:
    enter = Edges.enter

    async def anew(self):
        end = await enter(self)
        self._averages.started = self._started = 0
        return end

    patch.setattr(Edges, "enter", anew)


def nobody_looks_for_steps_after_the_last_mean(patch: pytest.MonkeyPatch) -> None:
    async def none(self):
        return False

    patch.setattr(Node, "has_more", none)


LATE_MUTANTS = {
    apply.__name__: (apply, first)
    for apply, first in [
        (only_the_last_block_is_dealt_again, 2),
        (a_block_that_was_merged_with_the_dead_is_dealt_again, 30),
        (what_is_under_way_is_not_begun_again, 9),
        (a_joiner_counts_averages_from_the_start, 9),
        (nobody_looks_for_steps_after_the_last_mean, 0),
    ]
}
"""Functions that make a mutant, by name, each with a schedule to try first."""
