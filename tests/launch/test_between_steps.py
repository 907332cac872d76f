"""All nodes resume from the same step, though each reads its own files only."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.storage.checkpoint import NO_STEP
from shoal.testing.problems import Slope, simulate
from shoal.vocabulary.strategy import Strategy


class Readable:
    """Checkpoints of which each node can read some steps."""

    def __init__(self, steps):
        self.steps, self.asked, self.loaded = steps, [], {}
        self.folder, self.told = "ckpt", []
        self.marks, self.attempt = [], self

    def begin(self, mark):
        self.marks.append(mark)

    def check(self):
        pass

    def newest(self, me, limit):
        self.asked.append(me.rank)
        return max((s for s in self.steps[me.rank] if limit is None or s <= limit), default=NO_STEP)

    def set_aside_after(self, step, me):
        return ["ckpt/set-aside"] if any(own > step for own in self.steps[me.rank]) else []

    def crew_at(self, step, me):
        return None

    def load(self, step, engine):
        self.loaded[engine.rank] = step


class Listening(Control):
    """A connection of which we keep what nodes say."""

    def __init__(self, told):
        super().__init__()
        self._told = told

    def announce(self, text):
        self._told.append(text)


@dataclass(frozen=True)
class Resumes(Strategy):
    """Resumes, and does nothing else."""

    servers = 1

    saved: Any = None
    began: dict[int, int | None] = field(default_factory=dict)

    async def worker(self, w):
        self.began[w.rank] = await BetweenSteps(Listening(self.saved.told), self.saved).resume(w.engine)

    async def server(self, s):
        await self.worker(s)


def resumed(*steps):
    """Where two workers and a server begin that can read these steps, and the checkpoints."""
    strategy = Resumes(Readable(dict(enumerate(steps))))
    run = simulate(strategy, Slope(), workers=2, steps=1, start=[0.0])
    assert all(node.meter.bytes_sent == 0 for node in run.nodes)  # of the training itself
    return [strategy.began[rank] for rank in range(3)], strategy.saved


def test_all_resume_from_the_newest_step_and_each_looks_once():
    began, saved = resumed([4, 8], [4, 8], [4, 8])
    assert began == [8, 8, 8] and saved.loaded == {0: 8, 1: 8, 2: 8}
    assert sorted(saved.asked) == [0, 1, 2]
    assert len(saved.marks) == 3 and len(set(saved.marks)) == 1  # of this attempt, at all nodes


@pytest.mark.parametrize("damaged", range(3))
def test_what_one_node_cannot_read_no_node_resumes_from(damaged):
    began, _ = resumed(*([4] if rank == damaged else [4, 8] for rank in range(3)))
    assert began == [4, 4, 4]


def test_nodes_that_name_different_steps_go_back_to_one_that_all_have():
    assert resumed([2, 5, 10], [2, 5, 8], [2, 8, 10])[0] == [2, 2, 2]


def test_without_a_step_that_all_have_all_start_from_the_beginning():
    began, saved = resumed([4, 8], [4, 8], [])
    assert began == [None, None, None] and not saved.loaded
    texts = saved.told
    assert len(texts) == 2 and len(set(texts)) == 1  # the launcher prints it once
    assert texts[0].startswith(
        "not all nodes can resume from the checkpoint in ckpt: the run starts from the"
    )
    assert "is now in ckpt/set-aside" in texts[0]
