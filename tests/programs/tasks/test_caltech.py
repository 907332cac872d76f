"""Caltech-101: decoded, split, normalised, changed at random and measured as it should be."""

import hashlib
import io
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from forked import run_forked
from shoal.core.errors import DataMissing, Unavailable
from shoal.core.task import Data
from shoal.programs.tasks import caltech
from shoal.programs.tasks.caltech import augment, per_class, smoothed_loss, top_5
from shoal.programs.tasks.data import Dataset

EXAMPLES = Path(__file__).parents[3] / "examples"
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (0, 0, 0), (255, 255, 255)]


def packed(colours, labels, split):
    """A file like the real one, of pictures of one colour each."""
    image = pytest.importorskip("PIL.Image")
    jpegs = []
    for colour in colours:
        file = io.BytesIO()
        image.new("RGB", (64, 64), colour).save(file, "JPEG", quality=95)
        jpegs.append(file.getvalue())
    contents = io.BytesIO()
    np.savez(
        contents,
        jpeg=np.frombuffer(b"".join(jpegs), np.uint8),
        offsets=np.cumsum([0, *map(len, jpegs)]),
        labels=np.array(labels, np.uint8),
        split=np.array(split, np.uint8),
    )
    return contents.getvalue()


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Six pictures, in classes 0, 1, 2 twice over."""
    contents = packed(COLOURS, labels=[0, 1, 2, 0, 1, 2], split=[0, 0, 0, 1, 1, 0])
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "small.npz").write_bytes(contents)
    sha256 = hashlib.sha256(contents).hexdigest()
    monkeypatch.setattr(caltech, "CALTECH", Dataset("small", {"small.npz": sha256}))
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    caltech.decoded.cache_clear()
    yield
    caltech.decoded.cache_clear()


@pytest.mark.usefixtures("pictures")
def test_pictures_are_decoded_split_and_normalised():
    data = caltech.caltech_data()
    assert data.x.shape == (4, 3, 64, 64) and data.test_x.shape == (2, 3, 64, 64)
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 2, 2] and data.test_y.tolist() == [0, 1]
    colours = torch.tensor([COLOURS[n] for n in (0, 1, 2, 5)]) / 255
    expected = (colours - torch.tensor(caltech.MEAN)) / torch.tensor(caltech.STD)
    # JPEG rounds colours to about a 255th
    torch.testing.assert_close(data.x.mean(dim=(2, 3)), expected, atol=0.03, rtol=0)
    assert data.x.std(dim=(2, 3)).max() < 0.01


@pytest.mark.usefixtures("pictures")
def test_without_the_background_classes_are_counted_from_0():
    data = caltech.objects_data()
    assert data.y.tolist() == [0, 1, 1] and data.test_y.tolist() == [0]
    assert torch.equal(data.x, caltech.caltech_data().x[1:])


@pytest.mark.usefixtures("pictures")
def test_files_are_decoded_once(monkeypatch):
    first = caltech.caltech_data()
    monkeypatch.setattr(caltech, "read", None)
    second = caltech.caltech_data()
    assert torch.equal(first.x, second.x)
    second.x.zero_()  # a run may change what it got
    assert torch.equal(first.x, caltech.caltech_data().x)


@pytest.mark.usefixtures("pictures")
def test_without_pillow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        Unavailable,
        match=r"^the Caltech-101 tasks need Pillow. Install it with: pip install 'shoal\[images\]'$",
    ):
        caltech.caltech_data()


def real_data() -> Data:
    caltech.decoded.cache_clear()
    try:
        return caltech.caltech_data()
    except (DataMissing, Unavailable) as error:
        pytest.skip(str(error))
    finally:
        caltech.decoded.cache_clear()


@pytest.mark.soak
def test_the_real_file_is_whole(monkeypatch):
    monkeypatch.setenv("SHOAL_OFFLINE", "1")
    data = real_data()
    assert data.x.shape == (6095, 3, 64, 64) and data.test_x.shape == (3049, 3, 64, 64)
    assert data.y.unique().tolist() == data.test_y.unique().tolist() == list(range(102))
    assert data.y.bincount().min() == 21 and data.y.bincount()[0] == 311
    torch.testing.assert_close(data.x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(data.x.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


# -- pictures changed at random --------------------------------------------------------------------


def seeded(seed, x):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return augment(x)


def test_a_seed_gives_the_same_pictures_again():
    x = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(seeded(1, x), seeded(1, x))
    assert not torch.equal(seeded(1, x), seeded(2, x))
    assert seeded(1, x).shape == x.shape


def test_what_is_given_stays_as_it_is():
    x = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    seeded(1, x)
    assert torch.equal(x, before)


def test_without_zoom_and_shift_a_picture_is_itself_or_its_mirror_image(monkeypatch):
    monkeypatch.setattr(caltech, "ZOOM", 0.0)
    monkeypatch.setattr(caltech, "SHIFT", 0.0)
    x = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    changed = seeded(3, x)
    same = (changed - x).abs().amax(dim=(1, 2, 3)) < 1e-5
    mirrored = (changed - x.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-5
    assert (same ^ mirrored).all()
    assert 16 <= int(mirrored.sum()) <= 48  # half of 64, give or take four standard deviations


def test_a_shift_moves_the_picture_and_no_further_than_it_says(monkeypatch):
    monkeypatch.setattr(caltech, "ZOOM", 0.0)
    x = torch.zeros(200, 1, 64, 64)
    x[:, :, 31:33, 31:33] = 1.0  # a dot in the middle
    changed = seeded(0, x)[:, 0]
    places = torch.arange(64.0) - 31.5
    weight = changed.sum(dim=(1, 2))
    down, right = (
        (changed.sum(dim=side) * places).sum(dim=1) / weight for side in (2, 1)
    )  # where the dot went, in pixels
    farthest = caltech.SHIFT * 32
    for moved in (down, right):
        assert 0.9 * farthest < moved.abs().max() < farthest + 0.1
        assert abs(float(moved.mean())) < 0.7  # of 200 draws from -4.8 to 4.8: three standard deviations


def test_colours_stay_within_their_range():
    x = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    changed = seeded(0, x)
    assert changed.min() >= 0 and changed.max() <= 1
    assert torch.equal(seeded(0, torch.ones(8, 3, 64, 64)).round(decimals=5), torch.ones(8, 3, 64, 64))


# -- what is measured ------------------------------------------------------------------------------


def test_smoothing_gives_a_tenth_of_a_label_to_all_classes():
    out, y = torch.tensor([[2.0, 0.0, 0.0, 1.0]]), torch.tensor([0])
    logs = out.log_softmax(dim=1)[0]
    expected = -0.9 * logs[0] - 0.1 * logs.mean()
    torch.testing.assert_close(smoothed_loss(out, y), expected)


def test_top_5_counts_a_class_among_the_five_likeliest():
    out = torch.arange(7.0).repeat(4, 1)  # the five likeliest are 2 to 6
    assert top_5(out, torch.tensor([6, 2, 1, 0])) == 50.0


def test_per_class_counts_rare_classes_like_others():
    out = torch.eye(4)[[0, 0, 0, 1]]
    # class 0: 3 of 3, class 1: 1 of 1
    assert per_class(out, torch.tensor([0, 0, 0, 1])) == 100.0
    # class 0: 2 of 2, class 2: 0 of 1, class 3: 0 of 1; class 1 is not there
    assert per_class(out, torch.tensor([0, 0, 2, 3])) == pytest.approx(100 / 3)


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pictures")
def test_the_task_runs_alike_again_with_what_it_measures():
    result, again = (
        shoal.run("caltech", "sync", workers=2, epochs=2, batch=1, transport="sim") for _ in range(2)
    )
    assert set(result.metrics) == {"top-5 %", "per-class %"}
    assert result.samples == 8
    for one, other in zip(result.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)  # the draws that change the pictures included


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_four_workers_reach_55_percent():
    real_data()
    result = shoal.run(
        "caltech", shoal.BMUF(period=8), workers=4, epochs=30, grow_batch="5@18,5@26", largest_batch=32
    )
    assert result.test_accuracy >= 55


# -- the examples that know NumPy alone, and JAX ---------------------------------------------------


def test_the_gradients_of_the_example_are_those_of_its_loss():
    pytest.importorskip("PIL.Image")
    example = runpy.run_path(str(EXAMPLES / "caltech_numpy.py"))
    draw = np.random.default_rng(0)
    p = {name: part + 0.1 * draw.normal(size=part.shape) for name, part in example["start"](0).items()}
    x, y = draw.normal(size=(5, 768)), np.array([3, 1, 101, 3, 0])
    slopes = example["gradients"](p, x, y)
    for name in p:
        direction = draw.normal(size=p[name].shape)
        ahead, behind = (
            example["loss"](example["outputs"]({**p, name: p[name] + side * 1e-5 * direction}, x), y)
            for side in (1, -1)
        )
        assert (slopes[name] * direction).sum() == pytest.approx((ahead - behind) / 2e-5, rel=1e-4)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("transport", ["sim", "processes"])
def test_a_network_of_jax_tells_red_from_blue_on_two_machines(tmp_path, transport):
    pytest.importorskip("jax")
    red, blue = (255, 0, 0), (0, 0, 255)
    contents = packed([red, blue] * 16, labels=[0, 1] * 16, split=[0] * 24 + [1] * 8)
    (tmp_path / "caltech101_64.npz").write_bytes(contents)
    options = f"--machines 2 --transport {transport} --strategy sync --epochs 4 --batch 4 --channels 4-4"
    program = [
        sys.executable,
        str(EXAMPLES / "caltech_jax.py"),
        *options.split(),
        "--pictures",
        "20",
        "--data",
        str(tmp_path),
    ]
    said = run_forked(program)
    assert said.returncode == 0, said.stderr
    assert "samples/s on 2 machines" in said.stdout
    assert "test accuracy 100.00 %" in said.stdout
