"""A gradient handed over during back-propagation is the gradient, whatever the loop around it does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.vector import Flat
from shoal.replicas import watch
from shoal.replicas.watch import Watch

WIDTH = 4


class Recorder:
    """Takes in, and notes what was there when each part was ready."""

    def __init__(self, flat: Flat, parts: list[slice]):
        self.unit = 1.0
        self.out = torch.full((flat.x.numel(),), float("nan"))
        self.parts = parts
        self.early: list[tuple[int, torch.Tensor]] = []
        self.begun = False

    def ready(self, part: int) -> None:
        self.early.append((part, self.out[self.parts[part]].clone()))


class Tower(nn.Module):
    """Three layers, of which one may be left out or used twice."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.path = [0, 1, 2]

    def forward(self, x):
        for number in self.path:
            x = self.layers[number](x)
        return x


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(watch, "PART_BYTES", 1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tower()


class Loop:
    """A training loop that is watched; nobody descends."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.flat = Flat(model)
        self.watch = Watch(self.flat)

    def step(self, *batches, samples=2, then=None, weight=None):
        """Back-propagate the batches; what was early, whether it changed, and what was taken in."""
        self.model.zero_grad(set_to_none=True)
        recorder = Recorder(self.flat, self.watch.parts)
        self.watch.begin(recorder, lambda: samples)
        for x in batches:
            self.model(x).square().mean().backward()
        if then is not None:
            then(self.model)
        before = len(recorder.early)
        changed = self.watch.end(samples if weight is None else weight)
        return recorder.early[:before], changed, recorder.out

    def gradient(self):
        return self.flat.gradient(torch.empty_like(self.flat.x))


def batch(seed=1):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_parts_are_whole_parameters_from_the_end_to_the_beginning(model):
    flat = Flat(model)
    assert [flat.x.numel() - part.stop for part in flat.parts(1)] == [0, 4, 20, 24, 40, 44]
    assert flat.parts(4 * 20) == [slice(40, 60), slice(20, 40), slice(0, 20)]
    assert flat.parts(4 * 21) == [slice(36, 60), slice(0, 36)]
    assert flat.parts(10**9) == [slice(0, 60)]


def test_nothing_is_early_in_the_first_step_and_all_but_the_last_part_in_the_second(model):
    loop = Loop(model)
    early, changed, out = loop.step(batch(1))
    assert (early, changed) == ([], False)
    assert torch.equal(out, 2 * loop.gradient())
    early, changed, out = loop.step(batch(2))
    assert [part for part, _ in early] == [0, 1, 2, 3, 4]
    assert not changed
    assert torch.equal(out, 2 * loop.gradient())
    for part, seen in early:  # final already then
        assert torch.equal(seen, out[loop.watch.parts[part]])


def test_accumulated_gradients_are_handed_over_in_the_last_pass(model):
    loop = Loop(model)
    loop.step(batch(1), batch(2), batch(3))
    early, changed, out = loop.step(batch(4), batch(5), batch(6))
    assert len(early) == 5 and not changed
    assert torch.equal(out, 2 * loop.gradient())
    for part, seen in early:
        assert torch.equal(seen, out[loop.watch.parts[part]])


def test_more_passes_than_usual_are_noticed_and_learnt(model):
    loop = Loop(model)
    loop.step(batch(1))
    early, changed, _ = loop.step(batch(2), batch(3))
    assert early and changed
    again = torch.empty_like(loop.flat.x)
    loop.watch.fill(again, 2)
    assert torch.equal(again, 2 * loop.gradient())
    early, changed, out = loop.step(batch(4), batch(5))
    assert len(early) == 5 and not changed
    assert torch.equal(out, 2 * loop.gradient())


def test_fewer_passes_than_usual_are_handed_over_at_the_end(model):
    loop = Loop(model)
    loop.step(batch(1), batch(2))
    early, changed, out = loop.step(batch(3))
    assert (early, changed) == ([], False)
    assert torch.equal(out, 2 * loop.gradient())


def test_a_layer_that_is_not_used_is_zero_and_holds_up_nobody(model):
    model.path = [0, 1]
    loop = Loop(model)
    loop.step(batch(1))
    early, changed, out = loop.step(batch(2))
    assert len(early) == 5 and not changed
    assert torch.equal(out, 2 * loop.gradient())
    assert not out[40:].any()
    model.path = [0, 1, 2]  # and then it is
    for seed in (3, 4):
        early, changed, out = loop.step(batch(seed))
        assert len(early) == 5 and not changed
        assert torch.equal(out, 2 * loop.gradient())


def test_a_shared_layer_is_final_when_both_uses_are_in(model):
    model.path = [0, 1, 0, 2]
    loop = Loop(model)
    loop.step(batch(1))
    early, changed, out = loop.step(batch(2))
    assert len(early) == 5 and not changed
    assert torch.equal(out, 2 * loop.gradient())


def test_tied_weights_are_one_parameter(model):
    model.layers[2].weight = model.layers[0].weight
    loop = Loop(model)
    loop.step(batch(1))
    early, changed, out = loop.step(batch(2))
    assert early and not changed
    assert torch.equal(out, 2 * loop.gradient())


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def test_gradients_that_are_clipped_are_taken_back_and_never_early_again(model):
    loop = Loop(model)
    loop.step(batch(1), then=clip)
    early, changed, _ = loop.step(batch(2), then=clip)
    assert early and changed
    early, changed, out = loop.step(batch(3), then=clip)
    assert (early, changed) == ([], False)
    assert torch.equal(out, 2 * loop.gradient())


def halve_in_secret(model):
    for p in model.parameters():
        p.grad.data.mul_(0.5)


def test_what_is_done_to_the_data_of_a_gradient_is_noticed(model):
    loop = Loop(model)
    loop.step(batch(1), then=halve_in_secret)
    early, changed, _ = loop.step(batch(2), then=halve_in_secret)
    assert early and changed
    early, changed, out = loop.step(batch(3), then=halve_in_secret)
    assert (early, changed) == ([], False)
    assert torch.equal(out, 2 * loop.gradient())


@pytest.mark.parametrize("width", [4, 512])
def test_a_back_propagation_that_was_thrown_away_is_taken_back(width):
    torch.manual_seed(0)
    loop = Loop(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))
    loop.step(torch.randn(2, width))

    def start_over(model):
        model.zero_grad(set_to_none=True)
        model(torch.randn(2, width)).square().mean().backward()

    early, changed, _ = loop.step(torch.randn(2, width), then=start_over)
    assert early and changed


def test_gradients_that_a_scaler_has_in_hand_are_taken_back(model):
    loop = Loop(model)
    loop.step(batch(1))
    recorder = Recorder(loop.flat, loop.watch.parts)
    loop.model.zero_grad()
    loop.watch.begin(recorder, lambda: 2)
    loop.model(batch(2)).square().mean().backward()
    assert recorder.early and loop.watch.end(2, trusted=False)
    assert loop.step(batch(3))[0] == []


def test_a_weight_that_turns_out_otherwise_is_noticed(model):
    loop = Loop(model)
    loop.step(batch(1))
    assert loop.step(batch(2), weight=2 / 1024)[1]  # a scaled loss
    early, changed, out = loop.step(batch(3), weight=2 / 1024)
    assert (early, changed) == ([], False)
    assert torch.equal(out, loop.gradient() * (2 / 1024))


def test_a_gradient_that_overflowed_counts_for_nothing(model):
    loop = Loop(model)
    _, _, out = loop.step(batch(1) * float("inf"), weight=0)
    assert not out.any()


def test_half_precision_is_multiplied_in_single():
    torch.manual_seed(0)
    loop = Loop(Tower(torch.bfloat16))
    loop.model.zero_grad()
    recorder = Recorder(loop.flat, loop.watch.parts)
    loop.watch.begin(recorder, lambda: 3)
    F.mse_loss(loop.model(batch().bfloat16()), torch.zeros(2, WIDTH).bfloat16()).backward()
    loop.watch.end(3)
    assert torch.equal(recorder.out, loop.gradient().float() * 3)


@pytest.mark.soak  # tests/api/test_small_scripts.py has a compiled one
def test_a_compiled_module_is_watched_too(model):
    compiled = torch.compile(model, backend="aot_eager")
    loop = Loop(compiled)
    loop.step(batch(1))
    _, changed, out = loop.step(batch(2))
    assert not changed
    assert torch.equal(out, 2 * loop.gradient())


def test_a_module_small_enough_for_one_part_is_not_hooked_into(model, monkeypatch):
    monkeypatch.setattr(watch, "PART_BYTES", 1 << 20)
    loop = Loop(model)
    loop.step(batch(1))
    early, changed, out = loop.step(batch(2))
    assert (early, changed) == ([], False)
    assert torch.equal(out, 2 * loop.gradient())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_watch_that_is_closed_leaves_no_hook(model):
    loop = Loop(model)
    assert not any(
        p._post_accumulate_grad_hooks for p in model.parameters()
    )  # most strategies stream nothing
    loop.step(batch(1))
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    loop.watch.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
