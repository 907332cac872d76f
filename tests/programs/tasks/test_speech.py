"""Spoken digits: features and errors computed by hand, labels by the rule, and that they are learnt."""

from __future__ import annotations

import hashlib
import math
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from shoal.core.errors import DataMissing
from shoal.core.task import UNLABELLED, Data, Task
from shoal.programs.models.chunks import Chunks
from shoal.programs.models.padding import unpad
from shoal.programs.tasks import TASKS, recordings, speech
from shoal.programs.tasks.mel import FLOOR, Mel
from shoal.programs.tasks.recordings import ORDER, Recording
from shoal.programs.tasks.speech import MEL, QUIET, SILENCE, frame_error, labelled, rows, utterance_error

NO = UNLABELLED


def tone(hertz: float, samples: int, volume: float = 0.5) -> Tensor:
    return volume * torch.sin(2 * math.pi * hertz / 8000 * torch.arange(samples))


# -------------------------------------------------------------------------------------------- the features


def test_a_frame_is_25_ms_and_one_begins_every_10_ms():
    assert (MEL.window_samples, MEL.hop_samples, MEL.bins) == (200, 80, 256)
    frames = MEL.frames(torch.arange(1000.0))
    assert len(frames) == 1 + (1000 - 200) // 80 == 11
    assert frames[3].tolist() == list(range(240, 440))


def test_the_features_of_one_frame_computed_directly():
    torch.manual_seed(0)
    samples = torch.randn(500) / 8
    found = MEL.features(samples)[2].double()
    frame = samples[160:360].double().tolist()
    windowed = [s * (0.5 - 0.5 * math.cos(2 * math.pi * n / 199)) for n, s in enumerate(frame)]

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    for band in (0, 7, 39):
        total = 0.0
        for k in range(129):  # the slow Fourier transform
            turn = -2 * math.pi * k / 256
            real = sum(s * math.cos(turn * n) for n, s in enumerate(windowed))
            imaginary = sum(s * math.sin(turn * n) for n, s in enumerate(windowed))
            steps = mel(k * 8000 / 256) / (mel(4000) / 41)  # 40 centres cut the scale into 41
            total += max(0.0, 1 - abs(steps - (band + 1))) * (real**2 + imaginary**2)
        assert float(found[band]) == pytest.approx(math.log(total), abs=1e-4)


def test_between_the_outer_centres_the_weights_of_a_frequency_add_up_to_one():
    filters = MEL.filters()
    assert filters.shape == (40, 129)
    centre_of_last = filters[-1].argmax()
    inner = filters.sum(dim=0)[2 : int(centre_of_last)]  # 62.5 Hz is above the first centre, at 34 Hz
    torch.testing.assert_close(inner, torch.ones_like(inner))
    assert (filters.sum(dim=0) < 1 + 1e-5).all()
    assert filters[:, 0].sum() == 0 and filters[:, -1].sum() < 1e-4  # a constant is no sound


def test_every_band_hears_something_and_bands_are_in_order():
    filters = MEL.filters()
    assert (filters.sum(dim=1) > 0).all()
    heard = (filters * torch.arange(129)).sum(dim=1) / filters.sum(dim=1)
    assert heard.diff().min() > 0


def test_a_tone_is_loudest_in_the_band_around_it():
    for hertz in (300.0, 1000.0, 3000.0):
        band = int(MEL.features(tone(hertz, 400))[0].argmax())
        place = 2595 * math.log10(1 + hertz / 700) / (2595 * math.log10(1 + 4000 / 700)) * 41
        assert abs(band + 1 - place) <= 1


def test_digital_silence_is_finite():
    assert MEL.features(torch.zeros(300)).unique().item() == pytest.approx(math.log(FLOOR))
    assert MEL.decibels(torch.zeros(300)).unique().item() == pytest.approx(-100.0)


def test_a_tone_of_half_the_amplitude_has_six_decibels_less():
    loud, soft = (MEL.decibels(tone(1000.0, 200, volume)) for volume in (1.0, 0.5))
    assert loud.item() == pytest.approx(10 * math.log10(0.5), abs=1e-3)  # the mean square of a sine is 1/2
    assert (loud - soft).item() == pytest.approx(20 * math.log10(2), abs=1e-3)


def test_another_rate_has_frames_of_its_own():
    assert (Mel(rate=16000).window_samples, Mel(rate=16000).bins) == (400, 512)


# ---------------------------------------------------------------------------------------------- the labels


def spoken(digit: int, *parts: Tensor) -> Recording:
    return Recording(torch.cat(parts), speaker=0, digit=digit, take=9)


def test_silence_around_a_tone_is_labelled_silence():
    """800 samples of silence, of tone, of silence: frame t covers 80 t to 80 t + 200, so 8 to 19 hear it."""
    quiet = torch.zeros(800)
    features, labels = labelled([spoken(7, quiet, tone(1000.0, 800), quiet)])
    assert features.shape == (28, 40)  # 1 + (2400 - 200) // 80
    expected = [SILENCE] * 8 + [7] * 12 + [SILENCE] * 8  # 80 * 8 + 200 = 840 samples: 40 of the tone
    assert labels.tolist() == expected


def test_what_counts_is_how_far_below_the_loudest_frame_it_is():
    loud = 0.5
    for below, label in ((QUIET - 1, 3), (QUIET + 1, SILENCE)):
        soft = loud * 10 ** (-below / 20)
        _, labels = labelled([spoken(3, tone(1000.0, 800, loud), tone(1000.0, 800, soft))])
        assert labels[0] == 3 and labels[-1] == label


def test_a_frame_across_two_recordings_is_neither():
    """The border lies at sample 1,000: frames that begin after 800 and before 1,000 are across it."""
    _, labels = labelled([spoken(1, tone(500.0, 1000)), spoken(2, tone(500.0, 600))])
    assert len(labels) == 1 + (1600 - 200) // 80 == 18
    assert (
        labels.tolist() == [1] * 11 + [NO] * 2 + [2] * 5
    )  # 80 * 10 = 800 still ends at 1,000; 80 * 13 = 1,040


def test_a_soft_recording_is_judged_by_its_own_loudest_frame():
    _, labels = labelled([spoken(1, tone(500.0, 1000, 0.9)), spoken(2, tone(500.0, 1000, 0.001))])
    assert set(labels.tolist()) == {1, NO, 2}


def test_rows_are_of_one_speaker_and_hold_each_recording_once():
    many = [Recording(torch.zeros(1), speaker, digit, 0) for speaker in range(2) for digit in range(10)]
    found = list(rows(many, connected=4))
    assert [len(row) for row in found] == [4, 4, 2, 4, 4, 2]
    assert all(len({one.speaker for one in row}) == 1 for row in found)
    assert sorted((one.speaker, one.digit) for row in found for one in row) == [
        (one.speaker, one.digit) for one in many
    ]
    assert found[0][0].digit != 0 or found[0][1].digit != 1  # shuffled
    assert [[one.digit for one in row] for row in rows(many, 4)] == [[o.digit for o in row] for row in found]


def test_rows_without_digits_are_refused():
    with pytest.raises(ValueError, match="connected=0: a sequence holds at least 1 digit"):
        list(rows([], 0))


# ---------------------------------------------------------------------------------------------- the errors


def answers(*classes: int, sure: float = 4.0) -> Tensor:
    """Logits that say these classes."""
    return sure * torch.nn.functional.one_hot(torch.tensor(classes), speech.CLASSES).float()


def test_the_frame_error_counts_labelled_frames_only():
    y = torch.tensor([3, 3, SILENCE, NO, 5])
    assert frame_error(answers(3, 4, SILENCE, 0, 5), y) == pytest.approx(25.0)
    assert frame_error(answers(3, 4, SILENCE, 0, 5)[None], y[None]) == pytest.approx(25.0)


def test_a_recording_is_the_digit_that_most_of_its_speech_sounds_like():
    y = torch.tensor([3, 3, 3, NO, 3, 3, SILENCE, NO])
    said = answers(3, 3, 8, 0, 3, 8, 8, 0)
    said[5] *= 2  # surer of 8 than the frame before is of 3; that silence sounds like 8 does not count
    assert utterance_error(said, y) == pytest.approx(50.0)
    assert frame_error(said, y) == pytest.approx(100 * 3 / 6)


def test_silence_cannot_be_what_was_said():
    y = torch.tensor([3, 3, NO])
    said = answers(SILENCE, SILENCE, 0)
    said[:, 3] += 1.0
    assert utterance_error(said, y) == 0.0
    assert frame_error(said, y) == 100.0


def test_rows_and_recordings_within_a_row_are_kept_apart():
    full, two = [3, 3, 3, 3], [4, NO, NO, 3]  # the first row has no unlabelled frame at its end
    y = torch.tensor([full, two])
    said = torch.stack([answers(3, 3, 8, 3), answers(4, 0, 0, 8)])
    assert utterance_error(said, y) == pytest.approx(100 / 3)


# ---------------------------------------------------------------------------------------------- the data set


@pytest.fixture(scope="module")
def spoken_digits() -> list[Recording]:
    try:
        return recordings.recordings()
    except DataMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, spoken_digits: list[Recording]) -> list[Recording]:
    """Two speakers, eight takes of each digit, two of which are for testing."""
    some = [one for one in spoken_digits if one.speaker in (0, 1) and one.take in (0, 1, *range(10, 18))]
    monkeypatch.setattr(speech, "recordings", lambda: some)
    return some


def test_2700_recordings_are_for_training_and_300_for_testing(spoken_digits: list[Recording]):
    assert len(spoken_digits) == 3000
    test = [one for one in spoken_digits if one.is_test]
    assert len(test) == 300 and {one.take for one in test} == set(range(5))
    assert {(one.speaker, one.digit) for one in test} == {(s, d) for s in range(6) for d in range(10)}
    lengths = [len(one.samples) for one in spoken_digits]
    assert (sum(lengths), min(lengths), max(lengths)) == (10_498_424, 1_148, 18_262)
    assert all(one.samples.abs().max() <= 1 for one in spoken_digits)


def test_the_samples_are_those_that_the_sum_for_wav_files_was_taken_of(spoken_digits: list[Recording]):
    clips = [(one.samples * 32768).numpy().astype("<i2") for one in spoken_digits]
    assert hashlib.sha256(np.concatenate(clips).tobytes()).hexdigest() == recordings.SAMPLES_SHA256


def write_wav(folder: Path, samples: int = 300) -> str:
    """Every recording as a file of few samples; the sum of them all."""
    digest = hashlib.sha256()
    for n, which in enumerate(ORDER):
        contents = np.full(samples, n, "<i2").tobytes()
        digest.update(contents)
        with wave.open(str(recordings.wav_path(folder, *which)), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(8000)
            sound.writeframes(contents)
    return digest.hexdigest()


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "fsdd"


def test_a_clone_of_the_repository_does_as_well(own_data: Path, monkeypatch: pytest.MonkeyPatch):
    (own_data / "recordings").mkdir(parents=True)
    monkeypatch.setattr(recordings, "SAMPLES_SHA256", write_wav(own_data / "recordings"))
    found = recordings.recordings()
    assert [(one.speaker, one.digit, one.take) for one in found] == list(ORDER)
    assert (own_data / "recordings" / "3_jackson_7.wav").exists()
    which = ORDER.index((1, 3, 7))
    assert found[which].samples.tolist() == [which / 32768] * 300
    wrong = own_data / "recordings" / "9_yweweler_49.wav"
    wrong.write_bytes(wrong.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(DataMissing, match=r"have SHA-256 .*, expected .*. Take the files of https://"):
        recordings.recordings()
    wrong.unlink()
    with pytest.raises(DataMissing, match=r"9_yweweler_49.wav cannot be read"):
        recordings.recordings()


def test_without_the_data_it_says_where_to_put_them(own_data: Path):
    with pytest.raises(DataMissing, match=r"fsdd.npz is in none of .* Or clone https://.* as") as told:
        recordings.recordings()
    assert str(told.value).endswith(f"as {own_data}.")


# ----------------------------------------------------------------------------------------------- the tasks


def test_frames_are_samples_and_the_labels_tell_where_a_recording_ends(few: list[Recording]):
    data = speech.speech_dnn(context=2).data()
    per_recording = [1 + (len(one.samples) - 200) // 80 for one in few]
    training = sum(n for n, one in zip(per_recording, few, strict=True) if not one.is_test)
    assert data.x.shape == (training, 5 * 40) and data.y.shape == (training,)
    assert (data.y != NO).all()
    assert int((data.test_y == NO).sum()) == sum(one.is_test for one in few) == 40
    assert len(data.test_x) == sum(per_recording) - training + 40
    middle = data.x[:, 2 * 40 : 3 * 40]
    torch.testing.assert_close(middle.mean(dim=0), torch.zeros(40), atol=1e-3, rtol=0)
    torch.testing.assert_close(middle.std(dim=0), torch.ones(40))


def test_chunks_hold_every_label_of_the_sequences_once(few: list[Recording]):
    whole = speech.speech_dblstm(connected=4).data()
    cut = speech.speech_csc(connected=4, chunks="5-16+5").data()
    assert whole.x.shape[0] == 2 * 20 and cut.x.shape[1] == 26  # 80 takes of a speaker, four in a row
    for label in range(11):
        assert int((cut.y == label).sum()) == int((whole.y == label).sum()) > 0
    assert torch.equal(cut.test_x, whole.test_x) and torch.equal(cut.test_y, whole.test_y)
    frames, lengths = unpad(whole.x)
    assert frames.shape[2] == 40 and int(lengths.max()) == frames.shape[1]
    assert ((whole.y != NO).sum(dim=1) < lengths).all()  # the borders in a row have no label


@pytest.mark.parametrize(
    ("name", "sample", "parameters"),
    [("speech", (440,), 181_515), ("speech-dblstm", (9, 41), 44_747), ("speech-csc", (9, 41), 44_747)],
)
def test_the_models_take_the_samples_and_answer_eleven_classes(
    name: str, sample: tuple[int, ...], parameters: int
):
    model = TASKS[name]().model()
    x = torch.ones(2, *sample)  # the last channel of a sequence says that all frames are there
    assert model(x).shape == (2, *sample[:-1], 11)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_chunks_of_the_registered_task_are_those_of_the_paper():
    model = TASKS["speech-csc"]().model()
    assert model.chunks == Chunks(21, 64, 21) and model.hop == 32


def learnt(task: Task, data: Data, epochs: int) -> tuple[dict[str, float], dict[str, float]]:
    """The task's own figures before and after a few epochs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = task.model()

    def figures() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            out = model(data.test_x)
        model.train()
        return {name: metric(out, data.test_y) for name, metric in task.metrics.items()}

    before = figures()
    order = torch.Generator().manual_seed(0)
    optimizer = task.optimizer(model.parameters(), lr=task.lr)
    for _ in range(epochs):
        for picked in torch.randperm(len(data.x), generator=order).split(task.batch):
            optimizer.zero_grad()
            task.loss(model(data.x[picked]), data.y[picked]).backward()
            optimizer.step()
    return before, figures()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "epochs"),
    [
        (speech.speech_dnn(layers=1, width=64), 3),
        pytest.param(
            speech.speech_dblstm(layers=1, width=24, connected=2).but(batch=4), 8, marks=pytest.mark.soak
        ),
        pytest.param(
            speech.speech_csc(layers=1, width=24, connected=2, chunks="8-32+8").but(batch=10),
            5,
            marks=pytest.mark.soak,
        ),
    ],
    ids=lambda thing: getattr(thing, "name", None),
)
def test_training_reduces_both_errors(few: list[Recording], task: Task, epochs: int):
    before, after = learnt(task, task.data(), epochs)
    assert before["frame error %"] > 70 > 60 > after["frame error %"]
    assert after["utterance error %"] < 50 < before["utterance error %"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "sync", "bmuf"])
@pytest.mark.parametrize(
    "task",
    [
        speech.speech_dnn(layers=1, width=16, context=1),
        speech.speech_dblstm(layers=1, width=8, connected=8),
        speech.speech_csc(layers=1, width=8, connected=8, chunks="8-32+8"),
    ],
    ids=lambda task: task.name,
)
def test_any_strategy_trains_it_and_the_result_has_both_errors(
    monkeypatch: pytest.MonkeyPatch, few: list[Recording], task: Task, strategy: str
):
    fewer = [one for one in few if one.take in (0, 10, 11)]
    monkeypatch.setattr(speech, "recordings", lambda: fewer)
    workers = 1 if strategy == "single" else 2
    result = shoal.run(task, strategy, workers=workers, epochs=1, batch=64, transport="sim")
    assert result.metrics.keys() == {"frame error %", "utterance error %"}
    assert result.metrics["frame error %"] == pytest.approx(100 - (result.test_accuracy or 0.0), abs=1e-3)
