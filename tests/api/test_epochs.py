"""epochs(): attach before the first, finish after the last, and a sentence where a loop is left between."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak
from scripts import final_weights
from scripts import run_loop as run_a_script
from shoal.api.attachment import current

run_loop = partial(run_a_script, script=Path(__file__).with_name("epochs_loop.py"))
left_early = partial(pytest.warns, UserWarning, match=r"left in epoch 2, .* call training = shoal.attach")


def model_and_optimizer() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Linear, optimizer: torch.optim.SGD, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    model(scale * torch.arange(4.0)).square().sum().backward()
    optimizer.step()


@pytest.fixture(autouse=True)
def nothing_stays_attached():
    yield
    if training := current():
        training.abandon()


def test_it_takes_the_arguments_of_attach_behind_the_count():
    first, *others = inspect.signature(shoal.epochs).parameters.values()
    assert first.name == "count"
    assert others == list(inspect.signature(shoal.attach).parameters.values())


def test_a_loop_is_attached_while_it_runs_and_finished_behind_it():
    model, optimizer = model_and_optimizer()
    own_step, plain = optimizer.step, copy.deepcopy(model)
    with_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    seen = []
    for epoch in shoal.epochs(3, model, optimizer, "bmuf", buffers="own"):
        assert current() is not None and optimizer.step != own_step
        seen.append(epoch)
        step(model, optimizer)
        step(plain, with_plain)
    assert seen == [0, 1, 2]
    assert current() is None and optimizer.step == own_step
    assert torch.equal(model.weight, plain.weight)


def test_the_epochs_may_be_the_items_of_an_iterable():
    model, optimizer = model_and_optimizer()
    seen = []
    for rate in shoal.epochs((rate for rate in (0.1, 0.01)), model, optimizer):
        optimizer.param_groups[0]["lr"] = rate
        step(model, optimizer)
        seen.append(rate)
    assert seen == [0.1, 0.01] and current() is None


def test_several_models_are_attached_at_once():
    (generator, opt_g), (critic, opt_c) = model_and_optimizer(), model_and_optimizer()
    for _ in shoal.epochs(2, [generator, critic], [opt_g, opt_c]):
        step(generator, opt_g)
        step(critic, opt_c)
    assert torch.equal(generator.weight, critic.weight)


@pytest.mark.parametrize("way", ["break", "return", "raise"])
def test_a_loop_that_is_left_early_says_so_and_does_not_wait(way):
    model, optimizer = model_and_optimizer()

    def loop() -> None:
        for epoch in shoal.epochs(3, model, optimizer):
            step(model, optimizer)
            if epoch < 1:
                continue
            if way == "break":
                break
            if way == "return":
                return
            raise KeyError("the cat")

    with left_early() as caught:
        if way == "raise":
            with pytest.raises(KeyError, match="the cat"):
                loop()
        else:
            loop()
    assert [Path(one.filename) for one in caught] == [Path(__file__)]  # the user's line, and once
    assert current() is not None, "the end of the script finishes it"


def test_what_ends_a_step_is_said_alone():
    model, optimizer = model_and_optimizer()

    def loop() -> None:
        for _ in shoal.epochs(3, model, optimizer):
            step(model, optimizer, scale=float("nan"))

    with pytest.raises(shoal.Diverged):  # a warning would be an error
        loop()


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (2.5, "'float' object is not iterable"),
        (nn.Sequential(), r"epochs\(5, model, optimizer\), not a model"),
    ],
)
def test_what_is_no_count_is_refused_before_anything_is_attached(count, sentence):
    with pytest.raises(TypeError, match=sentence):
        shoal.epochs(count, *model_and_optimizer())
    assert current() is None


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
class TestOnTwoWorkers:
    @pytest.mark.parametrize("strategy", mostly_soak(["bmuf", "sync"], few=1))
    def test_it_is_attach_and_finish_bit_for_bit(self, strategy):
        (first, second), (attached, _) = run_loop(strategy=strategy), run_loop("--attach", strategy=strategy)
        assert first == second == attached

    def test_a_resumed_loop_goes_on_bit_for_bit(self, tmp_path):
        straight = run_loop()
        saved = {"checkpoint": str(tmp_path), "every": 4}
        with pytest.raises(shoal.WorkerFailed, match="exit code 9"):
            run_loop("--stop-after", "11", **saved)
        resumed = run_loop(**saved)
        assert "steps 18" in straight[0] and "steps 10" in resumed[0]  # which began after step 8
        assert torch.equal(final_weights(resumed[0]), final_weights(straight[0]))

    @pytest.mark.parametrize("strategy", ["sync", "bmuf", "asgd"])
    def test_a_worker_that_breaks_keeps_nobody_waiting(self, strategy):
        whole, left = run_loop("--break-at", "1", "1", strategy=strategy)
        assert "steps 18" in whole and "left in epoch" not in whole
        assert "steps 6" in left and "left in epoch 2" in left
