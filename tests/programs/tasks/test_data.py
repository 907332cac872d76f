"""Where data sets are found, how they are fetched, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from shoal.core.errors import DataMissing
from shoal.programs.tasks import data
from shoal.programs.tasks.data import Dataset, find, idx, read

CONTENTS = b"\0\0\x08\x01\0\0\0\x03abc"
FILE = "letters-idx1-ubyte.gz"
LETTERS = Dataset(name="letters", files={FILE: hashlib.sha256(CONTENTS).hexdigest()})


class Machine:
    """The places of one test, all below its temporary folder."""

    def __init__(self, root: Path) -> None:
        self.own = root / "own"
        self.cache = root / "cache"
        self.debian = root / "debian"
        self.mirror = root / "mirror"
        self.mirror.mkdir()

    def put(self, place: Path, packed: bytes) -> Path:
        path = place / "letters" / FILE
        path.parent.mkdir(parents=True)
        path.write_bytes(packed)
        return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    places = Machine(tmp_path)
    monkeypatch.setenv("SHOAL_DATA", str(places.own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.cache))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOAL_OFFLINE", "1")
    monkeypatch.setattr(data, "DEBIAN", places.debian)
    return places


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a web server for `machine.mirror`, on this host alone."""
    monkeypatch.delenv("SHOAL_OFFLINE")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(machine.mirror)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def at(*urls: str, file: str = FILE) -> Dataset:
    return Dataset(name="letters", files={file: LETTERS.files[FILE]}, urls=urls)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("place", ["own", "cache/shoal", "debian"])
def test_a_file_is_found_in_each_place(machine: Machine, place: str) -> None:
    path = machine.put(machine.own.parent / place, gzip.compress(CONTENTS))
    assert find(LETTERS) == {FILE: path}
    assert read(LETTERS) == {FILE: CONTENTS}


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    path = machine.put(tmp_path / "home" / ".cache" / "shoal", gzip.compress(CONTENTS))
    assert find(LETTERS) == {FILE: path}


def test_a_relative_cache_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert data.cache().is_absolute()


def test_a_user_without_a_home_has_a_cache_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert data.cache() == Path(tempfile.gettempdir(), "shoal")


def test_the_users_folder_goes_first(machine: Machine) -> None:
    machine.put(machine.debian, gzip.compress(CONTENTS))
    path = machine.put(machine.own, gzip.compress(CONTENTS))
    assert find(LETTERS) == {FILE: path}


def test_packing_does_not_matter(machine: Machine) -> None:
    """Distributors pack the same contents with other headers and levels."""
    first = gzip.compress(CONTENTS, compresslevel=1, mtime=0)
    second = gzip.compress(CONTENTS, compresslevel=9, mtime=1_000_000_000)
    assert first != second
    path = machine.put(machine.own, first)
    assert find(LETTERS) == {FILE: path}
    path.write_bytes(second)
    assert find(LETTERS) == {FILE: path}


DAMAGED = {
    "other contents": gzip.compress(CONTENTS[:-1] + b"d"),
    "cut off": gzip.compress(CONTENTS)[:-6],
    "bit flipped": gzip.compress(CONTENTS)[:-8] + b"\0\0\0\0" + gzip.compress(CONTENTS)[-4:],
    "not packed": CONTENTS,
    "followed by more": gzip.compress(CONTENTS) + b"more",
    "empty": b"",
}


@pytest.mark.parametrize("packed", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_named(machine: Machine, packed: bytes) -> None:
    path = machine.put(machine.own, packed)
    machine.put(machine.debian, gzip.compress(CONTENTS))  # a good copy elsewhere does not hide it
    for use in (find, read):
        with pytest.raises(DataMissing, match=r"damaged or cannot be read: .*or remove it") as caught:
            use(LETTERS)
        assert str(caught.value).startswith(str(path))


def test_contents_without_end_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LARGEST_BYTES", 5)
    machine.put(machine.own, gzip.compress(CONTENTS))
    with pytest.raises(DataMissing, match="decompresses to more than 5 bytes"):
        read(LETTERS)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_that_may_not_be_read_is_named(machine: Machine) -> None:
    machine.put(machine.own, gzip.compress(CONTENTS)).chmod(0)
    with pytest.raises(DataMissing, match=f"{FILE} is damaged or cannot be read: .*Permission denied"):
        read(LETTERS)


def test_missing_everywhere_names_all_places(machine: Machine) -> None:
    packaged = Dataset(
        name="letters", files=LETTERS.files, urls=("http://127.0.0.1:9/",), debian="dataset-letters"
    )
    with pytest.raises(DataMissing) as caught:
        find(packaged)
    assert str(caught.value) == (
        f"data set 'letters': {FILE} is in none of {machine.own}/letters, {machine.cache}/shoal/letters, "
        f"{machine.debian}/letters; SHOAL_OFFLINE is set, so nothing was downloaded. "
        f"Set SHOAL_DATA to the folder that holds letters/{FILE}, or on Debian: apt install dataset-letters."
    )


def test_without_an_address_nothing_is_downloaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_OFFLINE", "0")
    monkeypatch.delenv("SHOAL_DATA")
    with pytest.raises(DataMissing, match="it has no download address") as caught:
        find(LETTERS)
    assert str(machine.own) not in str(caught.value)
    assert "apt install" not in str(caught.value)


def test_a_download_lands_in_the_cache(machine: Machine, mirror: str) -> None:
    (machine.mirror / FILE).write_bytes(gzip.compress(CONTENTS))
    assert read(at(mirror)) == {FILE: CONTENTS}
    path = machine.cache / "shoal" / "letters" / FILE
    assert files_below(machine.cache) == [path]
    (machine.mirror / FILE).unlink()
    assert find(at(mirror)) == {FILE: path}  # not fetched again


def test_a_download_longer_than_one_piece_is_copied_whole(machine: Machine, mirror: str) -> None:
    noise = torch.randint(256, (3 * data.CHUNK_BYTES,), generator=torch.Generator().manual_seed(0))
    contents = bytes(noise.tolist())
    (machine.mirror / "noise.gz").write_bytes(gzip.compress(contents))
    dataset = Dataset(name="noise", files={"noise.gz": hashlib.sha256(contents).hexdigest()}, urls=(mirror,))
    assert read(dataset) == {"noise.gz": contents}
    assert find(dataset)["noise.gz"].read_bytes() == (machine.mirror / "noise.gz").read_bytes()


@pytest.mark.parametrize("packed", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_wrong_download_leaves_nothing_behind(machine: Machine, mirror: str, packed: bytes) -> None:
    (machine.mirror / FILE).write_bytes(packed)
    with pytest.raises(DataMissing, match=f"is in none of .* downloading {mirror}{FILE} failed: "):
        find(at(mirror))
    assert files_below(machine.cache) == []


def test_a_wrong_sum_is_reported_with_both_sums(machine: Machine, mirror: str) -> None:
    (machine.mirror / FILE).write_bytes(gzip.compress(b"others"))
    with pytest.raises(DataMissing) as caught:
        find(at(mirror))
    assert hashlib.sha256(b"others").hexdigest() in str(caught.value)
    assert LETTERS.files[FILE] in str(caught.value)


def test_the_next_mirror_is_tried(machine: Machine, mirror: str) -> None:
    (machine.mirror / FILE).write_bytes(gzip.compress(CONTENTS))
    assert read(at(f"{mirror}nowhere/", mirror)) == {FILE: CONTENTS}


def test_all_failed_mirrors_are_named(machine: Machine, mirror: str) -> None:
    with pytest.raises(DataMissing, match=r"/one/.*HTTP Error 404.*; .*/two/.*HTTP Error 404"):
        find(at(f"{mirror}one", f"{mirror}two"))


def test_a_mirror_that_does_not_answer_is_a_clear_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_OFFLINE")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataMissing, match=r"downloading http://127.0.0.1:9/.* failed: .*Connection refused"):
        find(at("http://127.0.0.1:9/"))
    assert files_below(machine.cache) == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(machine: Machine, mirror: str) -> None:
    machine.cache.write_bytes(b"a file where the folder should be")
    (machine.mirror / FILE).write_bytes(gzip.compress(CONTENTS))
    with pytest.raises(DataMissing, match=r"downloading .* failed: .*cache"):
        find(at(mirror))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal(
    machine: Machine, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    (machine.mirror / FILE).write_bytes(gzip.compress(CONTENTS))
    find(at(mirror))
    size = len(gzip.compress(CONTENTS))
    assert FILE in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert f"{size}/{size} bytes" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_download_is_silent_elsewhere(
    machine: Machine, mirror: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine.mirror / FILE).write_bytes(gzip.compress(CONTENTS))
    find(at(mirror))
    assert capsys.readouterr() == ("", "")


def test_idx_reads_an_array_of_bytes() -> None:
    assert idx(b"\0\0\x08\x02\0\0\0\x02\0\0\0\x03abcdef").tolist() == [[97, 98, 99], [100, 101, 102]]


def test_idx_reads_an_array_of_nothing() -> None:
    assert idx(b"\0\0\x08\x02\0\0\0\0\0\0\0\x1c").shape == (0, 28)


def test_idx_shares_the_memory_of_a_bytearray() -> None:
    contents = bytearray(CONTENTS)
    array = idx(contents)
    contents[-1] = 0
    assert array.tolist() == [97, 98, 0]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "begins with nothing"),
        (b"\0\0\x08", "begins with 00 00 08, expected"),
        (b"<html>", "begins with 3c 68 74 6d"),
        (b"\0\0\x0d\x01\0\0\0\x01abcd", "begins with 00 00 0d 01"),  # an array of floats
        (b"\0\0\x08\0", "begins with 00 00 08 00"),
        (b"\0\0\x08\x02\0\0\0\x02", "2 dimensions need 12 bytes, there are 8"),
        (b"\0\0\x08\xff" + bytes(8), "255 dimensions need 1024 bytes"),
        (CONTENTS[:-1], "promises 3 = 3 bytes, but 2 follow"),
        (CONTENTS + b"d", "promises 3 = 3 bytes, but 4 follow"),
        (b"\0\0\x08\x02" + b"\xff" * 8 + b"abc", "4294967295 x 4294967295 = 18446744065119617025 bytes"),
    ],
)
def test_idx_refuses_garbage(contents: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        idx(contents)


def test_a_file_that_is_not_packed_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Dataset(name="letters", files={"letters.txt": hashlib.sha256(CONTENTS).hexdigest()})
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letters.txt").write_bytes(CONTENTS)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    assert bytes(read(plain)["letters.txt"]) == CONTENTS
    (tmp_path / "letters" / "letters.txt").write_bytes(CONTENTS + b"!")
    with pytest.raises(DataMissing, match="SHA-256"):
        read(plain)
