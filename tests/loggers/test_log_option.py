"""`--log WORD[:WHERE]`: refused in one sentence before a run starts, or made."""

from __future__ import annotations

import pytest

from shoal import Unavailable
from shoal.loggers import log_option
from shoal.loggers.csv_files import CSV
from shoal.loggers.log_option import make_loggers


def test_an_unknown_word_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown logger 'tensorbord'. Did you mean 'tensorboard'\?"):
        make_loggers("tensorbord:runs/")


@pytest.mark.parametrize("word", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_says_what_to_install(word, monkeypatch):
    monkeypatch.setattr(log_option, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=rf"logger '{word}' needs .* pip install 'shoal\[{word}\]'"):
        make_loggers(f"{word}:x")


def test_nothing_is_made_if_one_of_several_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="unknown logger"):
        make_loggers([f"csv:{tmp_path}/figures", "cvs"])
    assert not (tmp_path / "figures").exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"log csv: .*file is not a folder"):
        make_loggers(f"csv:{tmp_path}/file")


def test_a_class_of_yours_is_found_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_loggers.py").write_text(
        "class Mine:\n"
        "    def __init__(self, where='here'):\n        self.where = where\n"
        "    def start(self, name, config): ...\n"
        "    def log(self, figures, *, step, samples, seconds): ...\n"
        "    def finish(self, state): ...\n"
        "class NotOne: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["."])
    first, second = make_loggers(["my_loggers.Mine", "my_loggers.Mine:there"])
    assert (first.where, second.where) == ("here", "there")
    with pytest.raises(TypeError, match="is no logger: it needs the methods start, log and finish"):
        make_loggers("my_loggers.NotOne")
    with pytest.raises(
        ValueError, match=r"log my_loggers.Other: module 'my_loggers' has no attribute 'Other'"
    ):
        make_loggers("my_loggers.Other")


def test_two_runs_of_one_name_have_two_files(tmp_path):
    for _ in range(2):
        logger = CSV(str(tmp_path))
        logger.start("sync-1117-0742", {})
        logger.log({"loss": 1.0}, step=1, samples=2, seconds=3.0)
        logger.log({"loss": 0.5, "test_loss": 4.0}, step=2, samples=4, seconds=6.0)
        logger.finish("done")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sync-1117-0742-2.csv", "sync-1117-0742.csv"]
    assert (tmp_path / "sync-1117-0742.csv").read_text() == "step,loss,test_loss\n1,1.0,\n2,0.5,4.0\n"
