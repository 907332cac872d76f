"""The acoustic models: their published sizes, and that what lies behind a sequence's end is no part of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.programs.models.acoustic import DBLSTM, DNN, splice


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_dnn_of_the_paper_has_63_million_parameters():
    with torch.device("meta"):  # counted, not allocated
        model = DNN()
    first, between, last = 572 * 2048 + 2048, 2048 * 2048 + 2048, 2048 * 18_002 + 18_002
    assert parameters(model) == first + 6 * between + last == 63_237_714
    assert sum(isinstance(part, nn.ReLU) for part in model) == 7


def test_the_dblstm_of_the_paper_has_11_72_million_parameters():
    with torch.device("meta"):
        model = DBLSTM()
    first = 2 * 4 * 256 * (52 + 256 + 2)  # two directions, four gates, two biases
    further = 2 * 4 * 256 * (512 + 256 + 2)
    assert parameters(model) == first + 4 * further + 512 * 9_304 + 9_304 == 11_715_672


def test_sizes_are_free():
    assert DNN(inputs=3, context=1, layers=1, width=4, classes=2)(torch.zeros(5, 9)).shape == (5, 2)
    assert DBLSTM(inputs=3, layers=1, width=4, classes=2)(torch.zeros(5, 6, 3)).shape == (5, 6, 2)


def test_the_dnn_takes_frames_in_any_arrangement():
    torch.manual_seed(0)
    model, x = DNN(3, 0, 1, 4, 2), torch.randn(2, 5, 3)
    torch.testing.assert_close(model(x).flatten(0, 1), model(x.flatten(0, 1)))


@pytest.mark.parametrize("size", ["inputs", "layers", "width", "classes"])
def test_a_size_below_one_is_refused(size: str):
    with pytest.raises(ValueError, match=rf"DNN\({size}=0\) is too small; take at least 1"):
        DNN(**{size: 0})
    with pytest.raises(ValueError, match=rf"DBLSTM\({size}=0\) is too small; take at least 1"):
        DBLSTM(**{size: 0})


def test_a_negative_context_is_refused():
    with pytest.raises(ValueError, match=r"context=-1.*0 gives each frame no neighbours"):
        DNN(context=-1)


# ---------------------------------------------------------------------------------------------- splicing


def test_a_frame_stands_between_its_neighbours_and_the_ends_are_repeated():
    frames = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    assert splice(frames, 1).tolist() == [
        [1, 10, 1, 10, 2, 20],  # no frame before the first
        [1, 10, 2, 20, 3, 30],
        [2, 20, 3, 30, 3, 30],
    ]


def test_without_context_a_frame_stands_alone():
    frames = torch.randn(4, 3)
    assert torch.equal(splice(frames, 0), frames)


# ----------------------------------------------------------------------------------------------- padding


@pytest.fixture
def model() -> DBLSTM:
    torch.manual_seed(0)
    return DBLSTM(inputs=3, layers=2, width=5, classes=4)


def outputs_and_gradient(model: DBLSTM, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    out = model(x, lengths)
    out.square().sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_what_lies_behind_the_end_changes_no_bit_of_outputs_or_gradient(model: DBLSTM):
    lengths = torch.tensor([4, 7, 2])
    x = torch.randn(3, 7, 3)
    longer = torch.cat([x, torch.full((3, 5, 3), 1e3)], dim=1)
    longer[0, 4:], longer[2, 2:] = -1e3, 1e3
    out, gradient = outputs_and_gradient(model, x, lengths)
    padded, same = outputs_and_gradient(model, longer, lengths)
    assert torch.equal(gradient, same)
    for row, length in enumerate(lengths):
        assert torch.equal(padded[row, :length], out[row, :length])
        assert torch.equal(padded[row, length:], torch.zeros(12 - length, 4))


def test_a_padded_sequence_is_read_as_if_it_were_alone(model: DBLSTM):
    x = torch.randn(2, 6, 3)
    together = model(x, torch.tensor([6, 3]))
    torch.testing.assert_close(together[1, :3], model(x[1:, :3])[0])  # other batches round otherwise
    # the control: without lengths the backward direction comes in from the padding
    assert not torch.allclose(model(x)[1, :3], together[1, :3], atol=1e-4)


def test_packed_and_by_direction_are_the_same_model(model: DBLSTM):
    """GPUs take the one way, processors the other."""
    x, lengths = torch.randn(4, 9, 3), torch.tensor([9, 3, 1, 6])
    learnt = []
    for read in (model.read_packed, model.read_by_direction):
        model.zero_grad()
        out = read(x, lengths)
        out.square().sum().backward()
        learnt.append([out.detach(), *(p.grad for p in model.parameters())])
    for packed, by_direction in zip(*learnt, strict=True):
        torch.testing.assert_close(packed, by_direction)
