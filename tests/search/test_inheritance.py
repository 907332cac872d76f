"""Exploit copies weights, optimizer state and data cursor bit for bit; only what the values say changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.core.growth import Growth
from shoal.core.task import Data, Task
from shoal.launch.audience import Audience
from shoal.runs.processes import run_in_process
from shoal.search.inheritance import inherit
from shoal.search.search_folder import piece_folder
from shoal.search.searcher import TrialPiece
from shoal.search.slots import train_piece
from shoal.search.space import Space
from shoal.search.trial_plan import TrialSettings, held_out_data, optimizer_options

VALUES = {"lr": 0.1, "momentum": 0.9, "batch": 8}


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.1))


def examples() -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return Data(x[:100], y[:100], x[100:], y[100:])


pytestmark = pytest.mark.slow  # an optimizer imports a part of torch that takes seconds

SETTINGS = TrialSettings(Task("linear", linear, examples, batch=8), seed=3)


def plan(folder: Path, values, epochs: int):
    return SETTINGS.plan(values, epochs, str(folder))


def newest(folder: Path, values, epochs: int) -> tuple[int, dict]:
    made = plan(folder, values, epochs)
    saved = made.checkpoints(made.task.data())
    step = saved.newest(made.identity(0))
    return step, saved.read(step, made.identity(0))


def train(folder: Path, values, epochs: int) -> torch.Tensor:
    result = run_in_process(plan(folder, values, epochs), Audience(None))
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_all_tensors_of_the_donor_are_copied_bit_for_bit(tmp_path):
    train(tmp_path / "donor", VALUES, 2)
    new = {"lr": 0.08, "momentum": 0.5, "batch": 8}
    target = plan(tmp_path / "loser", new, 3)
    inherit(
        tmp_path / "donor",
        plan(tmp_path / "donor", VALUES, 2),
        tmp_path / "loser",
        target,
        target.task.data(),
    )
    (donor,), (loser,) = ((tmp_path / who).glob("step-*/worker-0.safetensors") for who in ("donor", "loser"))
    assert donor.read_bytes() == loser.read_bytes()  # weights, momentum buffers, noise and random streams
    (step, before), (step_now, after) = (
        newest(tmp_path / "donor", VALUES, 2),
        newest(tmp_path / "loser", new, 3),
    )
    assert step == step_now == 20 and before["replica"]["position"] == after["replica"]["position"] == 20
    assert before["progress"] == after["progress"]
    old, changed = (state["replica"]["optimizer"]["param_groups"][0] for state in (before, after))
    assert {name for name in old if old[name] != changed[name]} == {"lr", "momentum"}
    assert (changed["lr"], changed["momentum"]) == (0.08, 0.5)


def test_a_copy_with_the_same_values_ends_as_the_donor_does(tmp_path):
    train(tmp_path / "donor", VALUES, 2)
    made = plan(tmp_path / "twin", VALUES, 5)
    inherit(
        tmp_path / "donor", plan(tmp_path / "donor", VALUES, 2), tmp_path / "twin", made, made.task.data()
    )
    assert torch.equal(train(tmp_path / "twin", VALUES, 5), train(tmp_path / "donor", VALUES, 5))
    assert torch.equal(train(tmp_path / "twin", VALUES, 5), train(tmp_path / "fresh", VALUES, 5))


def test_another_batch_continues_at_the_same_epoch(tmp_path):
    train(tmp_path / "donor", VALUES, 2)
    new = {**VALUES, "batch": 20}
    made = plan(tmp_path / "loser", new, 3)
    inherit(
        tmp_path / "donor", plan(tmp_path / "donor", VALUES, 2), tmp_path / "loser", made, made.task.data()
    )
    step, state = newest(tmp_path / "loser", new, 3)
    assert step == 8 and state["replica"]["position"] == 8  # 2 epochs of 80 / 20 steps, not of 80 / 8
    assert state["progress"]["samples"] == 160  # what was trained on stays
    run_in_process(made, Audience(None))
    assert newest(tmp_path / "loser", new, 3)[0] == 12


def test_a_piece_starts_from_its_origin_and_an_attempt_that_was_killed_goes_on(tmp_path):
    donor = TrialPiece(0, 0, VALUES, 0, 2)
    assert train_piece(SETTINGS, tmp_path, donor, None)["event"] == "done"
    loser = TrialPiece(1, 1, {**VALUES, "lr": 0.12}, 2, 3, origin=0)
    first = train_piece(SETTINGS, tmp_path, loser, donor)
    assert first["event"] == "done"
    again = train_piece(SETTINGS, tmp_path, loser, donor)  # as after a kill: nothing is trained twice
    assert (again["accuracy"], again["loss"]) == (first["accuracy"], first["loss"])
    assert (piece_folder(tmp_path, 1) / "model.safetensors").exists()


def test_a_trial_that_diverges_or_raises_says_so(tmp_path):
    wild = TrialPiece(0, 0, {**VALUES, "lr": 3e38}, 0, 2)
    said = train_piece(SETTINGS, tmp_path, wild, None)
    assert said["event"] == "failed" and said["diverged"]
    lost = TrialPiece(2, 0, VALUES, 2, 3, origin=1)
    said = train_piece(SETTINGS, tmp_path, lost, TrialPiece(1, 0, VALUES, 0, 2))
    assert said["event"] == "failed" and "no whole checkpoint" in said["message"]


def test_scores_are_on_examples_held_out_of_the_training_set_never_on_the_test_set():
    whole, part = examples(), held_out_data(examples, 0.2, 3)
    assert len(part.x) == 80 and len(part.test_x) == 20
    rows = {tuple(row.tolist()) for row in whole.x}
    trained, scored = ({tuple(row.tolist()) for row in x} for x in (part.x, part.test_x))
    assert trained | scored == rows and not trained & scored
    assert not scored & {tuple(row.tolist()) for row in whole.test_x}
    assert torch.equal(SETTINGS.plan(VALUES).task.data().test_x, part.test_x)


def test_unknown_names_and_values_that_cannot_run_are_refused_with_the_known_ones():
    for name, given, why in [
        ("momentun", (0.0, 0.9), "no hyper-parameter 'momentun'. Did you mean 'momentum'"),
        ("strategy.period", "1..8", "no hyper-parameter 'strategy.period'"),
        ("batch", "0..8", "batch = 0: batch=0"),
        ("lr", (-1.0, 1.0), "lr = -1.0: lr=-1.0"),
        ("momentum", (-1.0, 0.9), "momentum = -1.0: .*Invalid momentum"),
        ("codec", "none,fp61", "codec = fp61: unknown codec"),
    ]:
        with pytest.raises(ValueError, match=why):
            SETTINGS.check(Space({name: given}))
    SETTINGS.check(Space({"lr": (0.1, 1.0), "weight_decay": "log 1e-6..1e-2", "nesterov": [False]}))
    bmuf = TrialSettings(SETTINGS.task, "bmuf", workers=2)
    bmuf.check(Space({"strategy.period": "1..8", "codec": "none,fp16"}))
    with pytest.raises(ValueError, match=r"period = 0: .*must be at least 1"):
        bmuf.check(Space({"strategy.period": "0..8"}))


def test_what_could_not_go_on_from_a_checkpoint_is_refused():
    space = Space({"lr": (0.1, 1.0)})
    growing = replace(SETTINGS.task, growth=Growth.parse("2@1"))
    with pytest.raises(ValueError, match=r"the batch of task 'linear' grows, .*; search without growth"):
        TrialSettings(growing).check(space)
    with pytest.raises(ValueError, match=r"'sandblaster' writes no checkpoints, .* another strategy"):
        TrialSettings(SETTINGS.task, "sandblaster", workers=2).check(space)


def test_what_a_trials_state_depends_on_stays_while_it_trains():
    space = Space({"lr": (0.1, 1.0), "batch": [8, 16], "codec": ["none", "fp16"], "momentum": (0.0, 0.9)})
    assert SETTINGS.fixed(space) == {"codec"}
    assert TrialSettings(SETTINGS.task, "sync", workers=2).fixed(space) == {"codec", "batch"}


def test_the_hyper_parameters_of_an_optimizer_are_its_numbers():
    assert optimizer_options(torch.optim.SGD) == ["momentum", "dampening", "weight_decay", "nesterov"]
    assert "betas" in optimizer_options(torch.optim.Adam)
    assert "lr" not in optimizer_options(torch.optim.Adam)


def test_the_run_of_a_trial_has_the_patience_of_the_search():
    assert TrialSettings(SETTINGS.task, patience=7.0).plan({}).patience == 7.0
