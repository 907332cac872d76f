"""Context-sensitive chunks: how they lie, what is learnt from them, and what comes of decoding by them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.core.task import UNLABELLED, sequence_loss
from shoal.programs.models.acoustic import DBLSTM
from shoal.programs.models.chunks import AT_ONCE, Chunks, InChunks, Span, decode
from shoal.programs.models.padding import Padded, pad, pad_labels, unpad

LENGTHS = (3, 9, 6, 1)


@pytest.fixture
def model() -> DBLSTM:
    torch.manual_seed(0)
    return DBLSTM(inputs=2, layers=2, width=4, classes=3)


@pytest.fixture
def sequences() -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    x = [torch.randn(length, 2, generator=draw) for length in LENGTHS]
    return x, [torch.randint(3, (length,), generator=draw) for length in LENGTHS]


# ----------------------------------------------------------------------------------------- the notation


def test_the_notation_is_left_core_right():
    assert Chunks.parse("21-64+22") == Chunks(left=21, core=64, right=22)
    assert str(Chunks.parse("0-1+0")) == "0-1+0"


@pytest.mark.parametrize("text", ["", "64", "21-64", "21+64-21", "-1-64+21", "21-64+21 ", "a-b+c"])
def test_another_notation_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match=r"write left-core\+right, such as '21-64\+21'"):
        Chunks.parse(text)


def test_a_core_without_frames_is_refused():
    with pytest.raises(ValueError, match=r"chunks 21-0\+21: the core must be at least 1"):
        Chunks.parse("21-0+21")


# -------------------------------------------------------------------------------------------- the cutting


def test_150_frames_in_chunks_of_21_64_21():
    assert Chunks(21, 64, 21).cut(150) == [
        Span(begin=0, first=0, last=64, end=85),  # nothing before the beginning
        Span(begin=43, first=64, last=128, end=149),
        Span(begin=107, first=128, last=150, end=150),  # 22 are left, and nothing after them
    ]


def test_150_frames_with_cores_every_32_frames():
    spans = Chunks(21, 64, 21).cut(150, hop=32)
    assert [(span.first, span.last) for span in spans] == [(0, 64), (32, 96), (64, 128), (96, 150)]


any_chunks = st.builds(Chunks, st.integers(0, 30), st.integers(1, 70), st.integers(0, 30))


@given(any_chunks, st.integers(0, 400))
@settings(deadline=None)
def test_cores_cover_every_frame_exactly_once(chunks: Chunks, length: int):
    cores = [range(span.first, span.last) for span in chunks.cut(length)]
    assert [frame for core in cores for frame in core] == list(range(length))


@given(any_chunks, st.integers(1, 400), st.data())
@settings(deadline=None)
def test_a_chunk_reaches_as_far_as_its_context_or_the_sequence(
    chunks: Chunks, length: int, data: st.DataObject
):
    hop = data.draw(st.integers(1, chunks.core))
    spans = chunks.cut(length, hop)
    for span in spans:
        assert 0 <= span.begin <= span.first < span.last <= span.end <= length
        assert span.begin == max(0, span.first - chunks.left)
        assert span.end == min(length, span.last + chunks.right)
    assert all(span.last - span.first == chunks.core for span in spans[:-1])
    assert {f for span in spans for f in range(span.first, span.last)} == set(range(length))
    assert all(span.last < length for span in spans[:-1])  # none but the last reaches the end


@pytest.mark.parametrize("hop", [0, 65])
def test_a_hop_that_leaves_frames_out_is_refused(hop: int):
    with pytest.raises(ValueError, match=rf"hop={hop} .* take 1 to 64"):
        Chunks(21, 64, 21).cut(100, hop)


def test_only_the_core_is_labelled():
    x, y = torch.arange(5.0)[:, None], torch.arange(5)
    frames, labels = Chunks(1, 2, 1).samples([x], [y])
    assert [part.flatten().tolist() for part in frames] == [[0, 1, 2], [1, 2, 3, 4], [3, 4]]
    no = UNLABELLED
    assert [part.tolist() for part in labels] == [[0, 1, no], [no, 2, 3, no], [no, 4]]


def test_padding_carries_the_lengths():
    x = pad([torch.ones(1, 2), torch.full((3, 2), 5.0)])
    assert x.tolist() == [[[1, 1, 1], [0, 0, 0], [0, 0, 0]], [[5, 5, 1]] * 3]
    frames, lengths = unpad(x)
    assert frames.shape == (2, 3, 2) and lengths.tolist() == [1, 3]
    assert pad_labels([torch.tensor([7]), torch.tensor([8, 9])]).tolist() == [[7, UNLABELLED], [8, 9]]


# ------------------------------------------------------------------------------------------- the learning


def learn(
    model: torch.nn.Module, x: list[Tensor], y: list[Tensor], steps: int = 3
) -> tuple[list[float], Tensor]:
    """The losses of a few steps on one batch, and the parameters after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sequence_loss(model(pad(x)), pad_labels(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("text", ["0-9+0", "21-64+21", "2-10+0"])
def test_chunks_longer_than_the_sequences_are_whole_sequences_bit_for_bit(
    model: DBLSTM, sequences: tuple[list[Tensor], list[Tensor]], text: str
):
    chunks = Chunks.parse(text)
    whole = learn(Padded(copy.deepcopy(model)), *sequences)
    cut = learn(InChunks(copy.deepcopy(model), chunks, chunks.core), *chunks.samples(*sequences))
    assert cut[0] == whole[0] and len(set(whole[0])) == 3
    assert torch.equal(cut[1], whole[1])


def test_shorter_chunks_are_something_else(model: DBLSTM, sequences: tuple[list[Tensor], list[Tensor]]):
    chunks = Chunks.parse("1-4+1")
    whole = learn(Padded(copy.deepcopy(model)), *sequences)
    cut = learn(InChunks(copy.deepcopy(model), chunks, 4), *chunks.samples(*sequences))
    assert not torch.allclose(cut[1], whole[1])


def test_without_context_chunks_are_sequences_of_their_own(
    model: DBLSTM, sequences: tuple[list[Tensor], list[Tensor]]
):
    x, y = ([piece for one in part for piece in one.split(4)] for part in sequences)
    alone = learn(Padded(copy.deepcopy(model)), x, y)
    chunks = Chunks.parse("0-4+0")
    cut = learn(InChunks(copy.deepcopy(model), chunks, 4), *chunks.samples(*sequences))
    assert cut[0] == alone[0] and torch.equal(cut[1], alone[1])


def test_the_context_is_read_but_not_learnt_from(model: DBLSTM):
    """The gradient of a chunk is that of its core's loss alone, in which the context's frames still count."""
    x, y = torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    frames, labels = Chunks(2, 2, 2).samples([x], [y])
    middle, target = frames[1], labels[1]
    assert target.tolist() == [UNLABELLED] * 2 + [2, 0] + [UNLABELLED] * 2
    by_hand = -model(middle[None])[0].log_softmax(1)[[2, 3], [2, 0]].mean()
    by_hand.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    inputs = pad([middle]).requires_grad_()
    sequence_loss(Padded(model)(inputs), pad_labels([target])).backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert inputs.grad is not None
    assert (inputs.grad[0, :, :2].abs().sum(1) > 0).all()  # every frame of the chunk bears on the core


# ------------------------------------------------------------------------------------------- the decoding


@torch.no_grad()
def test_decoding_side_by_side_is_each_chunk_by_itself(
    model: DBLSTM, sequences: tuple[list[Tensor], list[Tensor]]
):
    chunks = Chunks(2, 3, 1)
    frames, lengths = unpad(pad(sequences[0]))
    found = decode(model, frames, lengths, chunks, hop=3)
    for row, x in enumerate(sequences[0]):
        for span in chunks.cut(len(x)):
            plain = model(x[None, span.begin : span.end])[0].log_softmax(1)
            core = plain[span.first - span.begin : span.last - span.begin]
            torch.testing.assert_close(found[row, span.first : span.last], core)
        assert not found[row, len(x) :].any()


@torch.no_grad()
def test_frames_that_are_covered_twice_get_the_mean_of_the_posteriors(model: DBLSTM):
    x = torch.randn(6, 2)
    found = decode(model, x[None], torch.tensor([6]), Chunks(0, 4, 0), hop=2)[0].exp()
    first, second = model(x[None, 0:4])[0].softmax(1), model(x[None, 2:6])[0].softmax(1)
    torch.testing.assert_close(found[0:2], first[0:2])
    torch.testing.assert_close(found[2:4], (first[2:4] + second[0:2]) / 2)
    torch.testing.assert_close(found[4:6], second[2:4])


@torch.no_grad()
def test_decoding_by_a_chunk_that_holds_all_is_decoding_the_whole(
    model: DBLSTM, sequences: tuple[list[Tensor], list[Tensor]]
):
    x = pad(sequences[0])
    whole = Padded(model)(x).log_softmax(dim=-1)
    found = InChunks(model, Chunks(5, 9, 5), hop=4).eval()(x)
    labelled = x[..., -1] == 1
    torch.testing.assert_close(found[labelled], whole[labelled])


@torch.no_grad()
def test_more_context_comes_ever_closer_to_the_whole(model: DBLSTM):
    x, length = torch.randn(1, 200, 2), torch.tensor([200])
    for p in model.lstm.parameters():
        p.mul_(2.0)  # a longer memory than that of fresh weights, which see hardly anything
    whole = model(x).log_softmax(dim=-1)
    far = [
        float((decode(model, x, length, Chunks(context, 10, context), hop=10) - whole).abs().max())
        for context in (0, 4, 16, 64, 200)
    ]
    assert far[0] > 0.1 and far == sorted(far, reverse=True)
    assert far[-1] < 1e-5  # rounding


@torch.no_grad()
def test_many_chunks_are_decoded_in_several_batches(model: DBLSTM):
    x = torch.randn(2, AT_ONCE, 2)
    found = decode(model, x, torch.tensor([AT_ONCE, 3]), Chunks(1, 1, 1), hop=1)
    torch.testing.assert_close(found[0, -1], model(x[:1, AT_ONCE - 2 :])[0, 1].log_softmax(0))
    torch.testing.assert_close(found[1, 0], model(x[1:, :2])[0, 0].log_softmax(0))  # in the second batch
