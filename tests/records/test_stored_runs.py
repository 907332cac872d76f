"""Which run a name means."""

from __future__ import annotations

import json

import pytest

from shoal.records.stored_runs import find_runs, read_records, read_runs


@pytest.fixture
def folder(tmp_path):
    """Three runs: bmuf and sync of one command, then bmuf again."""
    runs = [
        ("sync-1116-0900", "sync-1116-0900"),
        ("bmuf-1116-0900", "sync-1116-0900"),
        ("bmuf-1117-0742", ""),
    ]
    for hour, (name, first) in enumerate(runs):
        (tmp_path / name).mkdir()
        about = {"state": "done", "started": f"2026-11-17T{hour:02}:00:00+00:00", "first": first or name}
        (tmp_path / name / "run.json").write_text(json.dumps(about))
    (tmp_path / "no run").mkdir()
    return tmp_path


def names(word, folder):
    return [run.name for run in find_runs(word, str(folder))]


def test_runs_are_listed_newest_first(folder):
    assert [run.name for run in read_runs(folder)] == ["bmuf-1117-0742", "bmuf-1116-0900", "sync-1116-0900"]


def test_a_beginning_or_a_part_is_enough_if_it_is_clear(folder):
    assert names("sync", folder) == ["sync-1116-0900"]
    assert names("1117", folder) == ["bmuf-1117-0742"]
    with pytest.raises(ValueError, match="'bmuf' could be bmuf-1117-0742, bmuf-1116-0900; name more of it"):
        names("bmuf", folder)
    with pytest.raises(ValueError, match=r"is called 'easgd'. The newest: bmuf-1117-0742, "):
        names("easgd", folder)


def test_a_whole_name_is_clear_even_if_others_begin_with_it(folder):
    (folder / "bmuf-1117-0742").rename(folder / "sync-1116-0900-2")
    assert names("sync-1116-0900", folder) == ["sync-1116-0900"]


def test_last_is_the_whole_last_command(folder):
    assert names("last", folder) == ["bmuf-1117-0742"]
    (folder / "bmuf-1117-0742" / "run.json").unlink()
    assert names("last", folder) == ["sync-1116-0900", "bmuf-1116-0900"]  # in the order of the command


def test_a_folder_is_a_name_too(folder):
    assert names(folder / "sync-1116-0900", folder / "nowhere") == ["sync-1116-0900"]


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match="there is no run in"):
        names("last", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"runs": 3}', '{"runs": [1]}', '{"runs": [{"x": 1}]}', '{"findings": 1}']
)
def test_a_file_that_is_no_record_of_runs_is_refused(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="it holds no runs as --json writes them"):
        read_records(tmp_path / "a.json")
    with pytest.raises(ValueError, match="No such file"):
        read_records(tmp_path / "b.json")
