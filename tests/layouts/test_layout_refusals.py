"""What a layout cannot do is refused in a sentence, before any process starts."""

import pytest
import torch

import shoal
from laid_out_tasks import pictures, spread, two_inputs
from shoal.cli.compare import check_layouts
from shoal.core.vector import Layout
from shoal.layouts import LAYOUTS
from shoal.layouts.assembly import assembled
from shoal.layouts.group_part import HeldPiece
from shoal.layouts.split_words import layers_of_stages
from shoal.programs.models.hybrid import halves
from shoal.strategies import Local
from shoal.testing import blobs

PIPELINE = "pipeline:group=2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "hybrid"}, "does not say of how many processes"),
        ({"layout": PIPELINE, "transport": "sim"}, "`shoal split` shows a step"),
        ({"layout": PIPELINE, "strategy": "downpour"}, "go at their own speed"),
        ({"layout": PIPELINE, "strategy": "gossip", "workers": 2}, "go at their own speed"),
        ({"layout": PIPELINE, "crew": "1@0,2@5"}, "cannot join a run later"),
        ({"layout": PIPELINE, "balance": True}, "different speeds"),
        ({"layout": PIPELINE, "checkpoint": "there"}, "no process holds the whole model"),
        ({"layout": "tensor:group=2", "codec": "low_rank"}, "needs whole matrices"),
        ({"layout": "tensor:group=2", "strategy": "muloco"}, "looks at all matrices of a model"),
        ({"layout": PIPELINE, "strategy": Local(penalty=1.0)}, "looks at the norms of whole layers"),
        ({"layout": "data:group=2"}, "is one process"),
        ({"layout": "tensor:group=0"}, "group=0 must be at least 1"),
        ({"layout": "branches"}, "has no branches"),
        ({"layout": "pipeline:group=2,microbatches=3"}, "do not divide a worker's batch of 8 samples"),
        ({"layout": "pipeline:group=4,schedule=1f1b,microbatches=2"}, "at least as many microbatches"),
        ({"layout": "pipeline:group=2,split=2-2-4"}, "has 3 stages, and there must be 2"),
        ({"layout": "pipeline:group=2,split=ever"}, "should be auto"),
        ({"layout": "pipeline:group=2,schedule=zigzag"}, "must be one of auto, gpipe, 1f1b, interleaved"),
        ({"layout": "tensor:group=2", "task": spread()}, "take GroupNorm"),
        ({"layout": "tensor:group=2", "task": blobs(dropout=0.1)}, "dropout would draw other numbers"),
        ({"layout": "hybrid:group=2", "task": blobs(dropout=0.0)}, "is no nn.Sequential of layers"),
        ({"layout": "columns:group=2", "task": two_inputs(), "strategy": "single", "workers": 1}, None),
        ({"layout": "tensor:group=2", "task": pictures(optimizer=torch.optim.Adafactor)}, "whole tensors"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message, monkeypatch):
    def no_processes(*_):
        raise InterruptedError("nothing was refused")

    monkeypatch.setattr("shoal.api.run.run_processes", no_processes)
    settings = {"task": pictures(), "strategy": "sync", **settings}
    with pytest.raises(InterruptedError if message is None else ValueError, match=message):
        shoal.run(**settings)


class Tied(torch.nn.Module):
    """The output layer has the weights of the embedding; one layer is called twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(3, 3), torch.nn.Linear(3, 3)
        self.again, self.out = self.middle, torch.nn.Linear(3, 3)
        self.out.weight = self.embedding.weight


class TiedChain(torch.nn.Sequential):
    def __init__(self):
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        second.weight = first.weight
        super().__init__(torch.nn.Conv2d(1, 1, 1), torch.nn.Flatten(), first, torch.nn.Tanh(), second)


@pytest.mark.parametrize(
    ("layout", "model", "tied"),
    [
        *(
            (f"{cut}:group=2", Tied, "embedding.weight and out.weight")
            for cut in ("columns", "rows", "tensor")
        ),
        ("hybrid:group=2", TiedChain, "2.weight and 4.weight"),
    ],
)
def test_tied_weights_are_refused_where_one_of_them_would_be_cut(layout, model, tied):
    with pytest.raises(ValueError, match=f"{tied} are one tensor, and .*; take layout 'pipeline'"):
        LAYOUTS.read(layout).check(model(), pictures())


def test_a_layer_that_is_called_twice_may_be_cut():
    model = Tied()
    model.out.weight = torch.nn.Parameter(model.out.weight.detach().clone())
    LAYOUTS.read("columns:group=2").check(model, pictures())


def test_a_list_of_layouts_keeps_the_options_of_each():
    assert check_layouts(None, None) == ["data"]
    text = "data,pipeline:schedule=1f1b,microbatches=8,hybrid:group=2"
    assert check_layouts(text, None) == ["data", "pipeline:schedule=1f1b,microbatches=8", "hybrid:group=2"]


def test_split_is_that_of_every_pipeline_without_its_own():
    assert check_layouts("data,pipeline,pipeline:split=even", "auto") == [
        *("data", "pipeline:split=auto", "pipeline:split=even")
    ]


@pytest.mark.parametrize(
    ("layouts", "split", "message"),
    [
        ("data,hybrit", None, "Did you mean 'hybrid'"),
        ("data,hybrid:stages=2", None, "layout 'hybrid' has no option 'stages'"),
        ("data,hybrid", "auto", "--layouts names none"),
        ("pipeline", "here", "should be auto"),
        ("data,tensor,data", None, "names 'data' twice"),
    ],
)
def test_wrong_lists_are_refused_without_torch(layouts, split, message):
    with pytest.raises(ValueError, match=message):
        check_layouts(layouts, split)


def test_processes_that_are_no_whole_groups_are_refused():
    assert LAYOUTS.read("hybrid").over(4).group == 4
    assert LAYOUTS.read("hybrid:group=2").over(4).group == 2
    with pytest.raises(ValueError, match="3 processes cannot be shared out to workers of 2"):
        LAYOUTS.read("hybrid:group=2").over(3)


def test_layers_of_stages():
    assert layers_of_stages("5-4-4-5") == [5, 4, 4, 5]
    assert layers_of_stages("auto") is layers_of_stages("even") is None
    for wrong in ("", "5-0", "5,4", "5-"):
        with pytest.raises(ValueError, match="should be auto"):
            layers_of_stages(wrong)


def test_a_chain_falls_into_features_and_classifier():
    model = pictures().model()
    features, classifier = halves(model)
    assert [type(layer).__name__ for layer in features] == ["Conv2d", "Tanh", "Conv2d", "Flatten"]
    assert classifier[0] is model[1] and len(classifier) == 7


def test_the_whole_is_put_together_by_name_and_dimension():
    whole = Layout(("a", "b", "c"), (torch.Size([2, 3]), torch.Size([2]), torch.Size([1])))
    a, b, c = torch.arange(6.0).view(2, 3), torch.tensor([6.0, 7.0]), torch.tensor([8.0])
    first = [HeldPiece("a", (2, 2), 1), HeldPiece("b", (2,), None)]
    second = [HeldPiece("a", (2, 1), 1), HeldPiece("b", (2,), None), HeldPiece("c", (1,), None)]
    parts = [
        (first, torch.cat([a[:, :2].reshape(-1), b])),
        (second, torch.cat([a[:, 2:].reshape(-1), b + 1, c])),
    ]
    assert assembled(whole, parts).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]  # the first one's b
    with pytest.raises(ValueError, match="do not hold all of 'a', of shape"):
        assembled(whole, parts[1:])
    with pytest.raises(ValueError, match="do not hold all of 'c'"):
        assembled(whole, [([HeldPiece("a", (2, 3), None), first[1]], torch.cat([a.reshape(-1), b]))])
