"""Spoken digits, frame by frame: classify each frame as one of ten digits or as silence.

Three tasks on the Free Spoken Digit Dataset with the models of Chen & Huo 2016: a DNN that sees eleven
frames, a deep bidirectional LSTM on whole sequences, and the same LSTM in context-sensitive chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.seeds import stream
from shoal.core.task import UNLABELLED, Data, Task, sequence_loss
from shoal.programs.models.acoustic import DBLSTM, DNN, splice
from shoal.programs.models.chunks import Chunks, InChunks
from shoal.programs.models.padding import Padded, pad, pad_labels
from shoal.programs.tasks.mel import Mel
from shoal.programs.tasks.recordings import Recording, recordings

SILENCE = 10  # the class beside the digits 0 to 9
CLASSES = 11
QUIET = 30.0  # a frame this many decibels below the loudest one of its recording is silence

MEL = Mel()


# -- the tasks ---------------------------------------------------------------------------------------


def speech_dnn(layers: int = 2, width: int = 256, context: int = 5) -> Task:
    """A DNN that sees `context` frames on either side; a sample is a frame. The paper has 7 x 2,048 units."""
    return Task(
        name="speech",
        model=BuildDNN(layers, width, context),
        data=FrameData(context),
        loss=sequence_loss,
        optimizer=momentum_sgd,
        lr=0.05,
        batch=256,
        metrics=METRICS,
        about="frames of spoken digits (Free Spoken Digit Dataset): the digit or silence; DNN on 11 frames",
    )


def speech_dblstm(layers: int = 2, width: int = 32, connected: int = 5) -> Task:
    """A DBLSTM on whole sequences of `connected` digits. The paper has 5 x 256 cells."""
    return Task(
        name="speech-dblstm",
        model=BuildDBLSTM(layers, width),
        data=SequenceData(connected),
        loss=sequence_loss,
        optimizer=momentum_sgd,
        lr=0.2,
        batch=8,
        metrics=METRICS,
        about="the same frames in sequences of 5 digits; bidirectional LSTM 2 x (32+32), whole sequences",
    )


def speech_csc(
    layers: int = 2, width: int = 32, connected: int = 5, chunks: str = "21-64+21", hop: int | None = None
) -> Task:
    """The DBLSTM trained in chunks and decoded in overlapping ones; `hop` defaults to half a core."""
    cut = Chunks.parse(chunks)
    hop = max(1, cut.core // 2) if hop is None else hop
    return Task(
        name="speech-csc",
        model=BuildDBLSTM(layers, width, cut, hop),
        data=SequenceData(connected, cut),
        loss=sequence_loss,
        optimizer=momentum_sgd,
        lr=0.2,
        batch=32,
        metrics=METRICS,
        about="the same bidirectional LSTM trained in context-sensitive chunks, 21-64+21",
    )


def momentum_sgd(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """SGD with classical momentum, as in the paper."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


# -- the models --------------------------------------------------------------------------------------
# Classes, not closures: a task is pickled to other processes and must compare equal there.


@dataclass(frozen=True)
class BuildDNN:
    """Builds a DNN of this size."""

    layers: int
    width: int
    context: int

    def __call__(self) -> nn.Module:
        return DNN(MEL.bands, self.context, self.layers, self.width, CLASSES)


@dataclass(frozen=True)
class BuildDBLSTM:
    """Builds a DBLSTM of this size, for whole sequences or for chunks."""

    layers: int
    width: int
    chunks: Chunks | None = None
    hop: int = 0

    def __call__(self) -> nn.Module:
        model = DBLSTM(MEL.bands, self.layers, self.width, CLASSES)
        return Padded(model) if self.chunks is None else InChunks(model, self.chunks, self.hop)


# -- the data ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameData:
    """Frames as samples, each spliced with its neighbours in the same recording.

    An unlabelled row follows every test recording, so that the labels show where it ends.
    """

    context: int

    def __call__(self) -> Data:
        (x, y), (test_x, test_y) = sequences(connected=1)
        spliced = torch.cat([splice(frames, self.context) for frames in x])
        ended = [F.pad(splice(frames, self.context), (0, 0, 0, 1)) for frames in test_x]
        end = [F.pad(labels, (0, 1), value=UNLABELLED) for labels in test_y]
        return Data(spliced, torch.cat(y), torch.cat(ended), torch.cat(end))


@dataclass(frozen=True)
class SequenceData:
    """Sequences of several digits, or chunks of them, as samples; the test set has whole sequences."""

    connected: int
    chunks: Chunks | None = None

    def __call__(self) -> Data:
        (x, y), (test_x, test_y) = sequences(self.connected)
        if self.chunks is not None:
            x, y = self.chunks.samples(x, y)
        return Data(pad(x), pad_labels(y), pad(test_x), pad_labels(test_y))


Part = tuple[list[Tensor], list[Tensor]]
"""Features (frames, bands) and labels (frames) of every sequence."""


def sequences(connected: int) -> tuple[Part, Part]:
    """Training and test set; each band has mean 0 and variance 1 over the training set."""
    spoken = recordings()
    train = [labelled(row) for row in rows([one for one in spoken if not one.is_test], connected)]
    test = [labelled(row) for row in rows([one for one in spoken if one.is_test], connected)]
    std, mean = torch.std_mean(torch.cat([frames for frames, _ in train]), dim=0)

    def scaled(part: list[tuple[Tensor, Tensor]]) -> Part:
        return [(frames - mean) / std for frames, _ in part], [labels for _, labels in part]

    return scaled(train), scaled(test)


def rows(spoken: Sequence[Recording], connected: int) -> Iterator[list[Recording]]:
    """Groups of `connected` recordings of one speaker, in an order shuffled the same way every time."""
    if connected < 1:
        raise ValueError(f"connected={connected}: a sequence holds at least 1 digit")
    for speaker in sorted({one.speaker for one in spoken}):
        own = [one for one in spoken if one.speaker == speaker]
        order = torch.randperm(len(own), generator=stream(0, "speech", speaker)).tolist()
        for start in range(0, len(own), connected):
            yield [own[which] for which in order[start : start + connected]]


def labelled(row: Sequence[Recording]) -> tuple[Tensor, Tensor]:
    """Features and labels of recordings played one after the other.

    A frame is labelled with the digit of its recording, or SILENCE if it is QUIET decibels or more below the
    loudest frame of that recording. A frame that spans two recordings is UNLABELLED.
    """
    samples = torch.cat([one.samples for one in row])
    decibels = MEL.decibels(samples)
    labels = torch.full((len(decibels),), UNLABELLED)
    begin = 0
    for one in row:
        end = begin + len(one.samples)
        first = -(-begin // MEL.hop_samples)
        last = (end - MEL.window_samples) // MEL.hop_samples + 1
        own = decibels[first:last]
        labels[first:last] = torch.where(own > own.max() - QUIET, one.digit, SILENCE)
        begin = end
    return MEL.features(samples), labels


# -- the figures -------------------------------------------------------------------------------------


def frame_error(out: Tensor, y: Tensor) -> float:
    """The share of labelled frames that are classified wrongly, in per cent."""
    counts = y != UNLABELLED
    return 100.0 * float((out.argmax(dim=-1) != y)[counts].double().mean())


def utterance_error(out: Tensor, y: Tensor) -> float:
    """The share of recordings classified wrongly, in per cent, by posteriors summed over frames of speech.

    A recording is a run of labelled frames. Its labels say which of them are speech: silence can be told
    from speech without knowing the digit.
    """
    if y.ndim == 2:  # a full row has no unlabelled frame behind it
        out, y = F.pad(out, (0, 0, 0, 1)), F.pad(y, (0, 1), value=UNLABELLED)
    out, y = out.flatten(0, -2), y.flatten()
    speech = (y != UNLABELLED) & (y != SILENCE)
    _, recording = torch.unique((y == UNLABELLED).cumsum(0)[speech], return_inverse=True)
    many = int(recording.max()) + 1
    scores = out.new_zeros(many, SILENCE).index_add(0, recording, out[speech].softmax(dim=-1)[:, :SILENCE])
    truth = y.new_zeros(many).index_put((recording,), y[speech])
    return 100.0 * float((scores.argmax(dim=1) != truth).double().mean())


METRICS = {"frame error %": frame_error, "utterance error %": utterance_error}
