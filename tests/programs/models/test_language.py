"""The language model: what it may see, how large it is, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.core.task import sequence_loss
from shoal.programs.models.language import LanguageModel, Sizes


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(Sizes(symbols=11, context=8, width=12, heads=3, layers=2))


def test_no_place_sees_what_comes_after_it(model):
    torch.manual_seed(1)
    text = torch.randint(10, (2, 8))
    for place in range(8):
        changed = text.clone()
        changed[:, place] = 10  # a symbol that was nowhere
        before, after = model(text), model(changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert (before[:, place:] != after[:, place:]).any(dim=-1).all()  # it and all later ones do see it


def test_a_prefix_is_scored_as_within_the_whole(model):
    text = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(model(text[:, :5]), model(text)[:, :5])


def test_order_matters(model):
    assert not torch.allclose(
        model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1]
    )


def test_attention_is_the_mean_of_what_came_before_when_all_keys_are_alike(model):
    block = model.blocks[0]
    with torch.no_grad():
        block.questions.weight.zero_()  # questions and keys are their biases at every place
        block.questions.weight[24:] = torch.eye(12)  # values are the places themselves
        block.questions.bias.zero_()
        block.answers.weight.copy_(torch.eye(12))
        block.answers.bias.zero_()
    x = torch.randn(1, 5, 12)
    means = torch.stack([x[0, : k + 1].mean(dim=0) for k in range(5)])
    torch.testing.assert_close(block.attend(x)[0], means)


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_its_parameters_are_those_of_its_parts():
    sizes = Sizes()
    w = sizes.width
    attention = (3 * w * w + 3 * w) + (w * w + w)
    layer = (4 * w * w + 4 * w) + (4 * w * w + w)
    norms = 2 * 2 * w
    block = attention + layer + norms
    total = sizes.symbols * w + sizes.context * w + sizes.layers * block + 2 * w
    assert count(LanguageModel()) == total == 29_600


def test_the_last_layer_is_the_embedding():
    model = LanguageModel(Sizes(symbols=7, layers=1))
    text = torch.tensor([[3, 1]])
    before = model(text)
    with torch.no_grad():
        model.embedding.weight[5] += 1.0  # of a symbol that is not in the text
    after = model(text)
    assert torch.equal(before[..., :5], after[..., :5]) and torch.equal(before[..., 6], after[..., 6])
    assert (before[..., 5] != after[..., 5]).all()


@pytest.mark.parametrize("seed", range(3))
def test_untrained_it_finds_all_symbols_about_as_likely(seed):
    torch.manual_seed(seed)
    text = torch.randint(65, (4, 64))
    loss = sequence_loss(LanguageModel()(text), torch.randint(65, (4, 64))).item()
    assert loss == pytest.approx(math.log(65), abs=0.1)


def test_it_learns_what_follows_what():
    torch.manual_seed(0)
    model = LanguageModel(Sizes(symbols=5, context=8, width=16, heads=2, layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        x = (torch.randint(5, (16, 1)) + 2 * torch.arange(8)) % 5  # every symbol is the one before plus 2
        optimizer.zero_grad()
        sequence_loss(model(x), (x + 2) % 5).backward()
        optimizer.step()
    assert sequence_loss(model(x), (x + 2) % 5).item() < 0.1


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match="width=32 cannot be divided among heads=5; take a multiple, such as 30"
    ):
        Sizes(heads=5)
    with pytest.raises(ValueError, match="layers=0: a language model needs at least 1"):
        Sizes(layers=0)
    with pytest.raises(ValueError, match="a sequence of 65 symbols is longer than the context of 64"):
        LanguageModel()(torch.zeros(1, 65, dtype=torch.int64))
