"""Belief nets trained layer by layer: stages, freezing, going on after a stop, what scikit-learn asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from sampling import mostly_soak
from shoal.api.belief_rows import Rows
from shoal.api.deep_belief import DBNClassifier, RBMTransformer, unrolled
from shoal.programs.models.pretraining import Momentum, Pretraining
from shoal.programs.models.rbm import RBM
from shoal.strategies import STRATEGIES, Single
from soon import SILENT, SOON

DRAW = torch.Generator().manual_seed(5)
PROTOTYPES = torch.bernoulli(torch.full((3, 12), 0.5), generator=DRAW)
LABELS = torch.arange(120) % 3
BITS = torch.where(torch.rand(120, 12, generator=DRAW) < 0.1, 1 - PROTOTYPES[LABELS], PROTOTYPES[LABELS])
SMALL = {"epochs": 2, "batch": 10, "finetune_batch": 10, "first_epochs": 1}


def rows() -> Rows:
    return Rows(BITS[:90].numpy(), BITS[90:].numpy())


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([t.reshape(-1) for t in model.state_dict().values()])


def rbm_task(batch: int = 10, **options) -> shoal.Task:
    return Pretraining(batch=batch, **options).task(12, 6, rows().unlabelled)


def net(**options) -> DBNClassifier:
    return DBNClassifier(**{**SMALL, "layers": (8, 6), "finetune": 2, **options})


def fitted(**options) -> DBNClassifier:
    return net(**options).fit(BITS[:90], LABELS[:90], BITS[90:], LABELS[90:])


usual = cache(fitted)
"""A net that several tests look at and none changes."""


def takes_momentum(word: str) -> bool:
    """Whether a strategy leaves the optimizer to the task: that of an RBM has momentum."""
    strategy = STRATEGIES[word]
    return not strategy.own_optimizer and not strategy.plain_sgd_only


# -- an RBM is a task like any other -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "codec", "chains"),
    [
        *mostly_soak([(word, "none", 0) for word in STRATEGIES if takes_momentum(word)], few=2),
        *mostly_soak(
            [("asgd", "fp16", 10), ("bmuf", "top_k:density=0.2", 0), ("sync", "one_bit", 10)], few=1
        ),
    ],
)
def test_an_rbm_learns_under_any_strategy_and_codec(word, codec, chains):
    strategy = STRATEGIES.make(word, **SOON.get(word, {}))
    workers = 1 if isinstance(strategy, Single) else 4
    task = rbm_task(lr=0.07, chains=chains)
    result = shoal.run(task, strategy, codec=codec, workers=workers, epochs=5, transport="sim")
    before, after = result.curve[0]["metrics"], result.metrics
    assert after["reconstruction error"] < 0.9 * before["reconstruction error"]
    assert result.test_loss == after["reconstruction error"] and result.test_accuracy is None
    assert set(after) == {"reconstruction error", "pseudo-likelihood", "free-energy gap"}
    assert (result.bytes_sent == 0) == (word in SILENT)


def test_a_line_search_refuses_what_is_drawn_at_random():
    task = replace(rbm_task(), optimizer=torch.optim.SGD)  # its own has weight decay
    with pytest.raises(ValueError, match=r"draws something at random"):
        shoal.run(task, "sandblaster", workers=2, transport="sim")


def test_four_workers_in_step_learn_what_one_does_from_the_union_of_their_batches(monkeypatch):
    """The draws of four workers cannot be those of one, so here every draw is the likelier value."""
    monkeypatch.setattr(torch, "bernoulli", torch.round)
    one = shoal.run(rbm_task(batch=20), "sync", workers=1, epochs=3, transport="sim", seed=4)
    four = shoal.run(rbm_task(batch=5), "sync", workers=4, epochs=3, transport="sim", seed=4)
    assert torch.allclose(flat(one.model), flat(four.model), atol=1e-6)  # sums in another order
    assert (flat(one.model) - flat(rbm_task().model())).abs().max() > 0.01


def test_workers_begin_alike_and_draw_apart():
    """All see the same single row, so only draws can tell two workers' chains apart."""
    task = replace(rbm_task(chains=5), batch=1)
    seen: dict[int, Tensor] = {}

    class Kept(RBM):
        def forward(self, v: Tensor) -> Tensor:
            out = super().forward(v)
            if self.training:
                seen[id(self)] = self.fantasies.clone()
            return out

    def model() -> RBM:
        return Kept(12, 6, chains=5)

    shoal.run(replace(task, model=model), "sync", workers=2, epochs=1, transport="sim")
    first, second = seen.values()
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "options", mostly_soak([{"chains": 7, "steps": 2}, {}, {"units": "gaussian", "lr": 0.01}], few=1)
)
def test_a_resumed_rbm_has_the_same_weights_and_chains(options, tmp_path):
    task = rbm_task(optimizer=Momentum(first_steps=12), **options)  # 9 steps an epoch: resumed before it ends
    settings = {"workers": 1, "transport": "sim"}
    shoal.run(task, "sync", epochs=1, checkpoint=tmp_path, **settings)
    resumed = shoal.run(task, "sync", epochs=3, checkpoint=tmp_path, **settings)
    straight = shoal.run(task, "sync", epochs=3, **settings)
    assert ("fantasies" in straight.model.state_dict()) == ("chains" in options)
    assert torch.equal(flat(resumed.model), flat(straight.model))


def test_a_persistent_chain_moves_in_a_run():
    task = rbm_task(chains=7)
    result = shoal.run(task, "sync", workers=2, epochs=2, transport="sim")
    assert set(result.model.fantasies.unique().tolist()) == {0.0, 1.0}
    again = shoal.run(task, "sync", workers=2, epochs=1, transport="sim")
    assert not torch.equal(result.model.fantasies, again.model.fantasies)


@pytest.mark.parametrize(
    ("strategy", "options", "steps"),
    [  # 90 samples by 2 workers in batches of 10: 5 steps an epoch, and two epochs
        ("sync", {}, 10),
        ("local", {}, 10),
        ("sync_server", {}, 10),
        ("asgd", {}, 20),  # its server takes a step for each push
        ("softsync:collect=2", {}, 10),
        ("softsync:collect=1", {}, 20),
        ("downpour", {}, 10),  # its server is told what the workers' optimizers count
        ("sync", {"grow_batch": "2@1"}, 5 + 3),
        ("sync", {"grow_batch": "2@2"}, 10),
    ],
)
def test_the_first_momentum_lasts_for_its_epochs(strategy, options, steps):
    rbm = RBMTransformer(batch=10, first_epochs=2, strategy=strategy, workers=2, options=options)
    assert rbm._first_steps(90) == steps


def test_a_server_ends_the_first_momentum_after_its_epochs(monkeypatch):
    taken = []
    step = torch.optim.SGD.step

    def noting(self, closure=None):
        taken.append(self.param_groups[0]["momentum"])
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", noting)
    settings = {"hidden": 4, "batch": 10, "epochs": 2, "first_epochs": 1}
    RBMTransformer(**settings, strategy="asgd", workers=2).fit(BITS[:80])
    assert taken == [0.5] * 8 + [0.9] * 8


def test_a_crew_has_no_epochs_of_a_first_momentum():
    settings = {"hidden": 4, "batch": 10, "epochs": 1, "workers": 2, "options": {"crew": "1@0,2@3"}}
    with pytest.raises(ValueError, match="with crew, take first_epochs=0"):
        RBMTransformer(**settings).fit(BITS[:90])
    RBMTransformer(**settings, first_epochs=0).fit(BITS[:90])


# -- layer by layer ----------------------------------------------------------------------------------


def test_stages_come_in_order_and_are_told_of():
    told, events = [], []
    done = fitted(on_stage=told.append, on_progress=events.append)
    names = ["layer 1", "layer 2", "fine-tuning"]
    assert [stage.name for stage in told] == [stage.name for stage in done.stages_] == names
    assert [stage.result.task for stage in told] == [
        "rbm 12-8, cd-1, probability",
        "rbm 8-6, cd-1, probability",
        "dbn 12-8-6-3, dropout 0, 0",
    ]
    assert {event["stage"] for event in events} == set(names)
    assert told[0].record()["seconds"] == told[0].seconds > 0


def test_lower_layers_are_frozen_while_higher_ones_learn():
    low, high = usual(), fitted(layers=(8, 6, 5))
    for layer in (0, 1):
        assert torch.equal(flat(low.net_.layers[layer]), flat(high.net_.layers[layer]))


def test_fine_tuning_begins_with_the_weights_of_the_rbms_and_leaves_those_alone():
    done, pretrained = usual(), usual(finetune=0)
    assert torch.equal(flat(done.net_), flat(pretrained.net_))
    weights = {name: w.numpy() for name, w in done.net_.weights().items()}
    begins = unrolled([12, 8, 6, 3], 0.0, 0.0, weights)
    assert torch.equal(begins[:4](BITS), done.net_(BITS))
    assert not torch.equal(done.model_.layer1.weight, begins.layer1.weight)


def test_a_shared_bias_begins_as_the_one_below_and_replaces_it():
    own, shared = usual(finetune=0), fitted(finetune=0, share_bias=True)
    below, above = shared.net_.layers
    assert torch.equal(below.bias, above.visible_bias)
    assert torch.equal(below.weight, own.net_.layers[0].weight)  # the bias alone has moved
    assert not torch.equal(below.bias, own.net_.layers[0].bias)


def test_bits_drawn_from_the_layer_below_are_learnt_from_where_asked():
    means, bits = usual(finetune=0), fitted(finetune=0, up="sample")
    assert torch.equal(means.net_.layers[0].weight, bits.net_.layers[0].weight)
    assert not torch.equal(means.net_.layers[1].weight, bits.net_.layers[1].weight)


def test_the_rate_of_fine_tuning_falls_where_asked():
    falling = fitted(finetune_lower="3@1")
    config = falling.stages_[-1].result.config
    assert (config["grow_batch"], config["largest_batch"], config["batch"]) == ("3@1", 10, 10)
    assert not torch.equal(flat(falling.model_), flat(usual().model_))


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", mostly_soak(["layer 2", "layer 1", "fine-tuning"], few=1))
def test_a_fit_that_was_stopped_goes_on_where_it_was(where, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runs.simulated.PROGRESS_SECONDS", 0.0)  # hear of every step

    def stop(event):
        if event["stage"] == where and event["step"] >= 12:
            raise Stop

    with pytest.raises(Stop):
        fitted(checkpoint=tmp_path, every=5, on_progress=stop, dropout=0.2)
    steps = []
    resumed = fitted(
        checkpoint=tmp_path, every=5, dropout=0.2, on_progress=lambda e: steps.append((e["stage"], e["step"]))
    )
    straight = fitted(dropout=0.2)
    assert min(step for stage, step in steps if stage == where) > 10  # not from the beginning
    assert torch.equal(flat(resumed.net_), flat(straight.net_))
    assert torch.equal(flat(resumed.model_), flat(straight.model_))


def test_another_net_does_not_go_on_from_this_ones_checkpoint(tmp_path):
    fitted(checkpoint=tmp_path)
    with pytest.raises(shoal.CheckpointError, match="12-9"):
        fitted(checkpoint=tmp_path, layers=(9, 6))


def test_other_rows_or_labels_do_not_go_on_from_a_checkpoint(tmp_path):
    kept = fitted(checkpoint=tmp_path)
    others, labels = BITS[:90].clone(), LABELS[:90].clone()
    others[44] = 1 - others[44]
    labels[44] = (labels[44] + 1) % 3
    with pytest.raises(shoal.CheckpointError, match=r"belongs to another run: data='\w+' \(now '\w+'\)"):
        net(checkpoint=tmp_path).fit(others, LABELS[:90])
    with pytest.raises(shoal.CheckpointError, match=r"fine-tuning belongs to another run: data="):
        net(checkpoint=tmp_path).fit(BITS[:90], labels)
    assert torch.equal(flat(fitted(checkpoint=tmp_path).model_), flat(kept.model_))


@pytest.mark.slow
def test_processes_learn_what_virtual_time_does():
    options = {"strategy": shoal.BMUF(period=2), "workers": 2, "share_bias": True, "up": "sample"}
    here, there = fitted(**options), fitted(transport="processes", **options)
    assert torch.equal(flat(here.net_), flat(there.net_))
    assert torch.equal(flat(here.model_), flat(there.model_))
    assert there.stages_[0].result.transport == "processes"


# -- what scikit-learn asks for ----------------------------------------------------------------------


def test_a_net_learns_to_tell_classes_apart():
    done = fitted(epochs=10, finetune=20)
    assert done.score(BITS[90:], LABELS[90:]) > 0.9
    assert done.stages_[-1].result.test_accuracy == pytest.approx(100 * done.score(BITS[90:], LABELS[90:]))
    p = done.predict_proba(BITS[90:])
    assert p.shape == (30, 3) and np.allclose(p.sum(axis=1), 1, atol=1e-5)
    assert done.transform(BITS).shape == (120, 6)


def test_classes_may_be_words_and_inputs_arrays_that_may_not_be_written_to():
    words = np.array(["red", "green", "blue"])[LABELS.numpy()]
    x = BITS.numpy().astype(np.float64)
    x.setflags(write=False)
    done = net(epochs=10, finetune=20).fit(x[:90], words[:90], x[90:], words[90:])
    assert done.classes_.tolist() == ["blue", "green", "red"]
    assert done.score(x[90:], words[90:]) > 0.9
    assert done.stages_[-1].result.test_accuracy == pytest.approx(100 * done.score(x[90:], words[90:]))


# scikit-learn is imported by the tests that need it: not every process that collects them runs them


def test_clones_have_the_settings_and_nothing_learnt():
    from sklearn.base import clone, is_classifier

    for estimator in (net(strategy=shoal.BMUF(period=2), dropout=0.3), RBMTransformer(hidden=5, chains=3)):
        twin = clone(estimator)
        assert type(twin) is type(estimator) and twin.get_params() == estimator.get_params()
        assert not hasattr(twin, "stages_")
    assert is_classifier(net()) and not is_classifier(RBMTransformer())


def test_settings_are_changed_by_name_and_unknown_ones_refused():
    assert net().set_params(lr=0.5, layers=(4,)).get_params()["layers"] == (4,)
    with pytest.raises(ValueError, match="no setting 'rate'"):
        net().set_params(rate=0.5)


@pytest.mark.soak
def test_both_fit_into_a_pipeline():
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    features = RBMTransformer(hidden=10, epochs=30, batch=10)
    pipe = make_pipeline(MinMaxScaler(), features, net(layers=(8,), epochs=5, finetune=30))
    pipe.fit(BITS[:90].numpy(), LABELS[:90].numpy())
    assert pipe.score(BITS[90:].numpy(), LABELS[90:].numpy()) > 0.8  # a third by chance
    assert pipe[:2].transform(BITS.numpy()).shape == (120, 10)


@pytest.mark.soak
def test_a_search_changes_settings_and_finds_the_better_ones():
    from sklearn.model_selection import GridSearchCV

    search = GridSearchCV(net(layers=(8,)), {"finetune": [1, 30]}, cv=2)
    search.fit(BITS.numpy(), LABELS.numpy())
    assert search.best_params_ == {"finetune": 30}


def test_an_rbm_gives_features_reconstructs_and_scores():
    rbm = RBMTransformer(hidden=6, epochs=30, batch=10).fit(BITS[:90], test_x=BITS[90:])
    assert np.array_equal(rbm.transform(BITS), rbm.rbm_.hidden(BITS).detach().numpy())
    back = rbm.inverse_transform(rbm.transform(BITS[90:]))
    assert (back.round() == BITS[90:].numpy()).mean() > 0.85
    chance = RBMTransformer(hidden=6, epochs=1, batch=10, lr=1e-9).fit(BITS[:90])
    assert rbm.score(BITS[90:]) > chance.score(BITS[90:]) + 1
    twin = RBMTransformer(hidden=6, epochs=30, batch=10)
    assert np.array_equal(twin.fit_transform(BITS[:90]), rbm.transform(BITS[:90]))
    assert chance.stages_[0].result.metrics == {}  # no test rows, nothing to measure
    gaussian = RBMTransformer(hidden=6, units="gaussian", lr=0.01, epochs=5, batch=10).fit(BITS)
    assert gaussian.score(BITS) < 0


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layers": ()}, "at least one hidden layer"),
        ({"up": "both"}, "mean or the sample"),
        ({"strategy": "ensemble", "workers": 2}, "take 'sync'"),
    ],
)
def test_what_makes_no_net_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        fitted(**options)


def test_inputs_and_classes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a row for each example"):
        net().fit(BITS[0])
    with pytest.raises(ValueError, match="classes that y does not have"):
        net().fit(BITS[:90], LABELS[:90], BITS[90:], LABELS[90:] + 5)
    with pytest.raises(ValueError, match="only pretrained"):
        fitted().fit(BITS).predict(BITS)  # what was learnt before is forgotten
