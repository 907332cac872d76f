"""An update that would spoil the model is refused, its worker and layer are named, and training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan

import pytest
import torch

import shoal
from shoal.core.errors import Diverged
from shoal.core.identity import SERVER, NodeIdentity
from shoal.core.transport import Message
from shoal.core.vector import Layout, first_bad
from shoal.launch.recovery import Recovery
from shoal.sim import Compute
from shoal.strategies import ASGD, Downpour, Hogwild
from shoal.testing.problems import Quadratic, simulate
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central


@dataclass(frozen=True)
class Spoilt(Quadratic):
    """Gradients of which some elements are replaced: (worker, step) -> value of the last element."""

    values: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def gradient(self, rank, step, x):
        g = super().gradient(rank, step, x)
        if (rank, step) in self.values:
            g[-1] = self.values[rank, step]
        return g


PACE = Compute(1.0, slow={1: 1.3})


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_bad_update_changes_nothing_and_is_named(bad):
    problem = Spoilt(lr=0.25, targets=(1.0,), values={(0, 1): bad})
    run = simulate(ASGD(), problem, workers=2, steps=4, start=[8.0, 6.0], compute=PACE)
    (fault,) = run.server.meter.faults
    assert fault.startswith("an update of worker 0 at its step 2 was refused: element 1 is ")
    assert str(bad) in fault
    assert run.worker(0).meter.faults == [fault]
    assert run.worker(1).meter.faults == []
    assert run.server.version == 2 * 4 - 1
    assert bool(torch.isfinite(run.server.x).all())


def test_the_others_learn_as_if_the_bad_update_had_never_been_made():
    # worker 0 makes its only step with a gradient that is refused: worker 1 is alone with the model
    spoilt = Spoilt(lr=0.25, targets=(1.0,), values={(0, step): nan for step in range(3)})
    run = simulate(ASGD(), spoilt, workers=2, steps=3, start=[8.0, 6.0], compute=PACE)
    alone = simulate(ASGD(), Quadratic(lr=0.25, targets=(1.0,)), workers=1, steps=3, start=[8.0, 6.0])
    assert torch.equal(run.server.x, alone.server.x)


def test_values_so_large_that_only_their_sum_overflows_are_taken():
    assert first_bad(torch.tensor([3e38, 3e38])) is None
    assert first_bad(torch.tensor([3e38, inf])) == 1
    assert first_bad(torch.tensor([inf, -inf])) == 0
    assert first_bad(torch.empty(0)) is None


def test_a_worker_all_of_whose_updates_are_refused_gives_up_after_ten():
    problem = Spoilt(lr=0.25, values={(0, step): nan for step in range(20)})
    with pytest.raises(Diverged, match="10 updates in a row were refused; the last: an update of worker 0"):
        simulate(Downpour(), problem, workers=1, steps=20, start=[1.0])


@dataclass(frozen=True)
class Misshapen(Central):
    """Worker 0 pushes a vector of the wrong length, or dtype, and then a good one."""

    dtype: torch.dtype = torch.float64
    elements: int = 3

    async def worker(self, w: Node) -> None:
        question = await w.engine.mailbox.ask(
            w.size, Message("push", (torch.ones(self.elements, dtype=self.dtype),))
        )
        answer = await w.engine.mailbox.answer(question)
        assert answer.tag == "refused"
        await w.push(SERVER, torch.ones(2, dtype=torch.float64))

    async def server(self, s: Node) -> None:
        await ASGD().server(s)


@pytest.mark.parametrize(("dtype", "elements"), [(torch.float64, 3), (torch.float32, 2), (torch.float64, 0)])
def test_an_update_of_the_wrong_shape_or_type_is_refused(dtype, elements):
    run = simulate(Misshapen(dtype, elements), Quadratic(lr=1.0), workers=1, steps=1, start=[5.0, 5.0])
    assert run.server.x.tolist() == [4.0, 4.0]
    (fault,) = run.server.meter.faults
    assert "an update of worker 0" in fault and "was expected" in fault


def test_a_layer_is_found_by_the_place_of_its_element_also_in_a_shard():
    layout = Layout(
        ("first.weight", "first.bias", "last.weight"), (torch.Size([2, 3]), torch.Size([2]), torch.Size([4]))
    )
    assert layout.locate(0) == "element 0 of 'first.weight'"
    assert layout.locate(7) == "element 1 of 'first.bias'"
    me = NodeIdentity(rank=3, workers=2, servers=1, shards=2)
    second = Recovery().settings(me, layout, 4 * layout.numel)
    assert layout.locate(second["begins"] + 3) == "element 1 of 'last.weight'"  # place 6 + 3 of 12


class NotANumber(torch.nn.Module):
    """Its second layer's gradient is not a number for inputs above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 1)
        self.last = torch.nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.where(x > 100, torch.nan, self.first(x)))


def spoilt_data() -> shoal.Data:
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    x[5] = 1000.0
    y = (x[:, 0] > 0).long()
    return shoal.Data(x, y, x[8:], y[8:])


def test_a_task_with_one_bad_sample_is_learnt_from_the_others_and_the_layer_is_named():
    task = shoal.Task("spoilt", NotANumber, spoilt_data, lr=0.5, batch=8)
    result = shoal.run(task, "asgd", workers=2, epochs=3, transport="sim")
    faults = result.nodes[-1]["faults"]
    assert len(faults) == 3  # once an epoch
    assert all("element 0 of 'last.weight' is nan" in fault for fault in faults)
    assert result.test_loss == result.test_loss  # a number


def test_a_bad_update_is_not_added_to_memory_that_no_server_looks_at_first():
    problem = Spoilt(lr=0.25, targets=(1.0,), values={(0, 1): nan})
    run = simulate(Hogwild(), problem, workers=2, steps=4, start=[8.0, 6.0], compute=PACE)
    (fault,) = run.worker(0).meter.faults
    assert fault.startswith("an update of worker 0 at its step 2 was refused: element 1 is nan")
    assert bool(torch.isfinite(run.server.x).all())


@pytest.mark.parametrize("word", ["hogwild", "hierarchical"])
def test_a_promise_that_no_server_could_keep_is_refused(word):
    with pytest.raises(ValueError, match="cannot be put together again from a journal"):
        shoal.run("digits", word, workers=2, durability="journal", transport="sim")
