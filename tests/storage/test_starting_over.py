"""A run that cannot resume begins anew in the same folder, and never mixes its steps with the old ones."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shoal
from shoal.core.codec import Identity
from shoal.core.identity import NodeIdentity
from shoal.runs.plan import Plan
from shoal.storage.attempt_mark import AttemptMark
from shoal.storage.checkpoint import NO_STEP, Checkpoints
from shoal.storage.step_folders import aside_folder, records_in, remove_before, step_folder, steps_in
from shoal.testing import blobs


def train(folder, epochs, every=None):
    return shoal.run(
        blobs(), "sync", workers=2, epochs=epochs, transport="sim", checkpoint=folder, every=every
    )


def files_of(folder):
    plan = Plan(blobs(), shoal.Sync(), Identity(), workers=2, checkpoint=str(folder))
    return plan.checkpoints(blobs().data()), [plan.identity(rank) for rank in range(2)]


def latest(folder):
    files, nodes = files_of(folder)
    return files.latest(nodes)


def set_aside(folder):
    """The folders of earlier attempts."""
    return list(folder.glob("set-aside-*"))


def damage(folder):
    for step in steps_in(folder):
        (step_folder(folder, step) / "worker-1.safetensors").write_bytes(b"")


@pytest.fixture
def damaged(tmp_path):
    """The folder of a run of 20 steps, of which nothing can be resumed."""
    train(tmp_path, epochs=2, every=4)
    assert sorted(steps_in(tmp_path)) == [16, 20]
    damage(tmp_path)
    return tmp_path


def test_the_steps_of_the_new_run_are_kept_and_not_the_later_ones_of_the_old(damaged):
    train(damaged, epochs=1, every=4)
    assert latest(damaged) == 10
    assert sorted(steps_in(damaged)) == [8, 10] and not set_aside(damaged)


def test_until_it_has_saved_two_steps_the_old_ones_lie_aside_and_one_sentence_says_where(damaged, caplog):
    with caplog.at_level(logging.WARNING, logger="shoal"):
        train(damaged, epochs=1)
    (aside,) = set_aside(damaged)
    assert latest(damaged) == 10 and sorted(steps_in(aside)) == [16, 20]
    assert {path.name for path in step_folder(aside, 20).iterdir()} == {
        f"{name}.{end}" for name in ("worker-0", "worker-1") for end in ("json", "safetensors")
    } | {"model.safetensors"}
    assert len(caplog.messages) == 1 and f"is now in {aside}, until" in caplog.messages[0]
    train(damaged, epochs=2)
    assert latest(damaged) == 20 and not aside.exists()


def test_what_a_node_saved_before_it_died_is_not_completed_by_another_attempt(tmp_path):
    """Only worker 0 has saved step 8; the next attempt ends when only worker 1 has."""
    files, nodes = files_of(tmp_path)
    for mark, writer in zip("ab", nodes, strict=True):
        files.attempt.begin(mark)
        for node in nodes:
            files.set_aside_after(NO_STEP, node)
        files.write(8, writer, {})
    assert files.latest(nodes) == NO_STEP
    for node in nodes:
        files.set_aside_after(NO_STEP, node)
    there = {path.relative_to(tmp_path).parts[0]: path.name for path in tmp_path.rglob("*.json")}
    assert there == {"set-aside-00000000-a": "worker-0.json", "set-aside-00000000-b": "worker-1.json"}


def test_a_node_that_is_started_again_goes_on_with_the_mark_of_its_run(tmp_path):
    for mark in ("a", "b"):
        files_of(tmp_path)[0].attempt.begin(mark)
    assert str(files_of(tmp_path)[0].attempt) == "b"


def test_every_attempt_is_set_aside_in_a_folder_of_its_own(tmp_path):
    files, me = Checkpoints(tmp_path, {}, 1), NodeIdentity(0, 1)
    for mark, steps in {"a": [8], "b": [8, 12], "c": [4]}.items():
        files.attempt.begin(mark)
        for step in steps:
            files.write(step, me, {})
        files.set_aside_after(NO_STEP, me)
    aside = [aside_folder(tmp_path, NO_STEP, mark) for mark in "abc"]
    assert [sorted(steps_in(one)) for one in aside] == [[8], [8, 12], [4]]
    assert files.newest(me) == NO_STEP
    remove_before(tmp_path, 4)
    assert not any(one.exists() for one in aside)


@pytest.mark.parametrize("moved", range(1, 8))
def test_a_start_that_is_killed_while_it_sets_aside_is_completed_by_the_next(moved, tmp_path, monkeypatch):
    """It is killed after so many files; then everything is in the same folder, as if it had not been."""
    files, nodes = files_of(tmp_path)
    for step in (4, 8):
        for node in nodes:
            files.write(step, node, {"step": step})
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("worker-*")}
    replace, left = Path.replace, iter(range(moved))

    def replace_or_die(self, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replace(self, target)

    def begin():
        for node in nodes:
            files.set_aside_after(NO_STEP, node)

    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", replace_or_die)
        with pytest.raises(KeyboardInterrupt):
            begin()
    begin()
    (aside,) = set_aside(tmp_path)
    assert {path.relative_to(aside): path.read_bytes() for path in tmp_path.rglob("worker-*")} == written


def test_a_step_that_another_node_removes_at_this_moment_has_no_records(tmp_path, monkeypatch):
    def removed_meanwhile(self, pattern):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "glob", removed_meanwhile)
    assert records_in(tmp_path, 5) == []


def test_nodes_that_begin_at_once_write_one_mark_whatever_their_process_ids(tmp_path):
    marks = [AttemptMark(tmp_path) for _ in range(4)]
    for _ in range(20):
        with ThreadPoolExecutor(4) as nodes:
            list(nodes.map(lambda mark: mark.begin("one"), marks))
    assert [path.name for path in tmp_path.iterdir()] == ["attempt"]
    assert str(AttemptMark(tmp_path)) == "one"
