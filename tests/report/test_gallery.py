"""The page of a belief net, and the PNG files inside it."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import pytest
import torch
from test_html import read

from shoal.report.gallery import Dreams, write_gallery
from shoal.report.pixels import montage, png, signed


def decoded(content: bytes) -> torch.Tensor:
    """The grey and the alpha of a PNG file, after its specification; checks every chunk's sum."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kind, body = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        (check,) = struct.unpack(">I", content[place + 8 + length : place + 12 + length])
        assert check == zlib.crc32(kind + body)
        chunks[kind], place = body, place + 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 4, 0, 0, 0]
    lines = torch.tensor(list(zlib.decompress(chunks[b"IDAT"]))).view(height, 1 + 2 * width)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:].reshape(height, width, 2)


def inside(element: str) -> torch.Tensor:
    (content,) = re.findall(r"base64,([^\"]*)", element)
    return decoded(base64.b64decode(content))


def test_a_png_has_the_bytes_it_was_given():
    grey = torch.arange(6, dtype=torch.uint8).view(2, 3) * 40
    pixels = decoded(png(grey, 255 - grey))
    assert torch.equal(pixels[:, :, 0], grey.long())
    assert torch.equal(pixels[:, :, 1], 255 - grey.long())


def test_pictures_stand_side_by_side_with_a_gap_that_shows_the_page():
    pixels = inside(montage(torch.tensor([[[0.0, 0.5]], [[1.0, 2.0]]]), "two"))  # two pictures of 1 x 2
    assert pixels[:, :, 0].tolist() == [[0, 128, 0, 255, 255]]
    assert pixels[:, :, 1].tolist() == [[255, 255, 0, 255, 255]]


def test_rows_are_as_long_as_the_page_is_wide():
    element = montage(torch.zeros(40, 28, 28), "forty")
    assert 'width="984"' in element  # 17 pictures of 28 pixels and 16 gaps, all doubled
    assert inside(element).shape == (28 * 3 + 2, 28 * 17 + 16, 2)


def test_signed_pictures_have_grey_for_nothing():
    told = signed(torch.tensor([[[0.0, 2.0, -4.0]], [[0.0, 0.0, 0.0]]]))
    assert told.tolist() == [[[0.5, 0.75, 0.0]], [[0.5, 0.5, 0.5]]]


def test_what_is_no_picture_is_refused():
    with pytest.raises(ValueError, match="number, height, width"):
        montage(torch.zeros(3, 4), "flat")


def stage(make_run, metrics):
    curve = [
        {"seconds": 0.0, "samples": 100.0 * i, "test_loss": 1.0, "test_accuracy": None,
         "metrics": {name: value - i for name, value in metrics.items()}}
        for i in range(3)
    ]  # fmt: skip
    return make_run("sync", curve=curve, metrics=metrics, test_accuracy=None)


def test_the_page_has_stages_curves_filters_and_fantasies(make_run, tmp_path):
    stages = {
        "layer <1>": stage(make_run, {"reconstruction error": 60.0, "free-energy gap": 2.5}),
        "fine-tuning": make_run("sync"),
    }
    dreams = Dreams((0, 10), [torch.rand(3, 4, 4), torch.rand(3, 4, 4)])
    path = write_gallery(tmp_path / "new" / "page.html", "A net & more", stages, torch.randn(5, 4, 4), dreams)
    document = path.read_text()
    reader = read(document)
    assert re.findall(r"<h2>(.*?)</h2>", document) == [
        "Stages",
        "Curves",
        "Filters",
        "Fantasies",
    ]
    assert document.count("<img ") == 3 and "layer &lt;1&gt;" in document and "A net &amp; more" in document
    assert "60.00" in document and "97.00" in document
    words = "".join(reader.text)
    assert "after 10 steps" in words and "5 of 5 units" in words
    assert "<1>" not in "".join(reader.text).replace("layer <1>", "")
    assert not [value for _, name, value in reader.attributes if name == "src" and "data:" not in value]
    assert "3.00 % after 25,600 samples" in words and "58 after 200 samples" in words


def test_without_pictures_there_are_only_figures(make_run, tmp_path):
    path = write_gallery(tmp_path / "page.html", "t", {"layer 1": stage(make_run, {"free-energy gap": 2.0})})
    assert re.findall(r"<h2>(.*?)</h2>", path.read_text()) == ["Stages", "Curves"]
    assert "<img" not in path.read_text()


def test_the_same_stages_give_the_same_bytes(make_run, tmp_path):
    filters = torch.randn(5, 4, 4)
    one, two = (write_gallery(tmp_path / name, "t", {"a": make_run("sync")}, filters) for name in "ab")
    assert one.read_bytes() == two.read_bytes()
