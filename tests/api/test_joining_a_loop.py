"""A worker joins the run of a script with a loop of its own, and every sample still counts once an epoch.

The guest runs in a thread of the test. The loop takes its time until the guest takes part, or has given up.
"""

from __future__ import annotations

import logging
import shlex
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sampling import mostly_soak
from scripts import final_weights
from scripts import run_loop as run_a_script
from shoal.api.join_script import check_script, invitation_of, join_script
from shoal.api.same_model import check_same, describe
from shoal.core.codec import Identity
from shoal.core.errors import Interrupted, ShoalError, Unavailable, WorkerFailed
from shoal.launch import newcomer
from shoal.launch.crew import Crew
from shoal.launch.environment import Place
from shoal.launch.join import Access
from shoal.launch.keeper_process import tell_model
from shoal.launch.place_call import PlaceCall
from shoal.replicas.attached import AttachedReplica
from shoal.strategies import BMUF

LOOP = Path(__file__).with_name("mortal_loop.py")
EPOCHS = 20
PAUSE_SECONDS = (
    0.25  # of a step: a guest has some forty seconds to take part, and the steps after cost little
)
FOR_EVER = 1000.0

run_loop = partial(run_a_script, script=LOOP, workers=2, max_workers=3, strategy=None)


class Guest(logging.Handler):
    """Joins as soon as the run says how to. `is_to_leave` has it say goodbye once it takes part."""

    def __init__(self, hurry: Path, is_to_leave: bool) -> None:
        super().__init__()
        self.said: list[str] = []
        self.lines: list[str] = []
        self.failure: BaseException | None = None
        self.crew: Crew | None = None
        self._hurry, self._is_to_leave = hurry, is_to_leave
        self._thread = threading.Thread(target=self._join)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if "to join: " in self.said[-1]:
            self._words = shlex.split(self.said[-1].partition("to join: ")[2])
            self._thread.start()

    def _join(self) -> None:
        _, _, address, option, token, script, *arguments = self._words
        assert option == "--token-file"
        access = Access(token_file=token)
        try:
            with closing(PlaceCall(address, access)) as call:
                self.report = join_script(
                    call,
                    access,
                    script,
                    arguments,
                    on_start=lambda what, rank: None,
                    on_progress=self._take_part,
                    on_output=lambda name, line: self.lines.append(line),
                )
        except BaseException as failure:
            self.failure = failure
        self._hurry.touch()

    def _take_part(self, event: dict[str, object]) -> None:
        if event.get("samples") and self._is_to_leave:
            assert self.crew is not None
            self.crew.ask_to_stop()
        elif event.get("samples"):
            self._hurry.touch()

    def __enter__(self) -> Guest:
        logging.getLogger("shoal").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("shoal").removeHandler(self)
        self._thread.join()


@pytest.fixture
def visited(tmp_path, monkeypatch, warm_scripts):
    """Runs two workers with a third that joins: what they printed, and the guest."""

    def run(*options, is_to_leave=False, strategy=None, epochs=EPOCHS, **place):
        guest = Guest(tmp_path / "hurry", is_to_leave)

        class Seen(Crew):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                guest.crew = self

        monkeypatch.setattr(newcomer, "Crew", Seen)
        hurry = ["--hurry", str(tmp_path / "hurry"), "--pause", str(PAUSE_SECONDS)]
        words = ["--epochs", str(epochs), *hurry, *options]
        with guest:
            printed = run_loop(*words, strategy=strategy, transport="grpc", **place)
        guest.crew = None  # with the pipes of its process
        return printed, guest

    return run


slow = pytest.mark.slow


@slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", mostly_soak([None, "sync", "diloco"], few=1))
def test_a_guest_takes_its_share_and_all_end_with_one_model(visited, strategy):
    epochs = 5 * EPOCHS if strategy == "diloco" else EPOCHS  # a guest begins after an average: here few
    printed, guest = visited(strategy=strategy, epochs=epochs)
    assert guest.failure is None, guest.failure
    assert guest.report["samples"] > 0
    models = [final_weights(lines) for lines in (*printed, "\n".join(guest.lines))]
    assert all(torch.equal(model, models[0]) for model in models)
    if strategy is None:  # it counts samples
        assert models[0].unique().tolist() == [float(EPOCHS)]
    assert "worker 2 joins from 127.0.0.1" in guest.said
    assert not any("has left" in line for line in guest.said)


@slow
@pytest.mark.timeout(200)
def test_a_guest_that_says_goodbye_leaves_its_samples_to_the_others(visited):
    printed, guest = visited(is_to_leave=True)
    assert isinstance(guest.failure, Interrupted)
    assert [final_weights(lines).unique().tolist() for lines in printed] == [[float(EPOCHS)]] * 2
    assert "worker 2 has left; its place is open" in guest.said


@slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("odd", "strategy", "sentence"),
    mostly_soak(
        [
            ("data", None, "it reads 59 samples in batches of 4, and the others read 60 samples"),
            ("optimizer", "diloco", r"has momentum=0.0 \(SGD, group 0\) where this script has momentum=0.5"),
            ("rate", "sync", r"worker 2 has joined, and its optimizer has lr=0.5"),
            ("model", None, r"which has parameter counts \(60,\) torch.float64, group 0 where this script"),
            ("optimizer", "sync", "where this script has momentum=0.5"),
        ],
        few=2,
    ),
)
def test_a_guest_that_would_train_something_else_gives_up_and_the_run_goes_on(
    visited, odd, strategy, sentence
):
    waits = {"timeout": FOR_EVER, "patience": FOR_EVER}  # for one that has vanished; this one says goodbye
    printed, guest = visited("--odd", odd, strategy=strategy, epochs=8, **waits)
    assert isinstance(guest.failure, WorkerFailed)
    with pytest.raises(WorkerFailed, match=sentence):
        raise guest.failure
    assert all("weights" in lines for lines in printed)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"transport": "processes"}, "over gRPC, and not over 'processes'"),
        ({"transport": "grpc", "strategy": "asgd"}, "nobody can join workers of 'asgd'"),
        ({"transport": "grpc", "max_workers": 1}, "2 workers begin"),
    ],
)
def test_places_that_nobody_could_take_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        run_loop(**settings)


@slow
@pytest.mark.usefixtures("warm_scripts")
def test_they_are_refused_too_if_the_script_names_such_a_strategy():
    with pytest.raises(WorkerFailed, match="nobody can join workers of 'gossip' here"):
        run_loop("--strategy-in-code", "gossip", transport="grpc")


def test_another_script_and_other_arguments_are_refused(tmp_path):
    told = invitation_of(LOOP, ["--epochs", "3"], Place())["script"]
    other = tmp_path / "other.py"
    other.write_text("import shoal")
    with pytest.raises(
        Unavailable, match=r"other.py' is another script than the 'mortal_loop.py' of the run"
    ):
        check_script(told, other, ["--epochs", "3"])
    with pytest.raises(Unavailable, match="with --epochs 3, and not with none; take the same"):
        check_script(told, LOOP, [])
    check_script(told, LOOP, ["--epochs", "3"])


def described(*groups, kind=torch.optim.AdamW, **options):
    model = nn.Linear(3, 2)
    given = [{"params": getattr(model, name), **own} for name, own in groups] or model.parameters()
    return describe(BMUF(), Identity(), model, AttachedReplica(model, kind(given, **options)))


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        (described(kind=torch.optim.Adam), r"AdamW, group 0\) where this script has .* \(Adam, group 0\)"),
        (described(betas=(0.9, 0.99)), r"betas=\(0.9, 0.999\) .* where this script has betas=\(0.9, 0.99\)"),
        (described(lr=0.5), r"has lr=0.001 .* where this script has lr=0.5"),
        (
            described(("weight", {}), ("bias", {"weight_decay": 0.0})),
            r"parameter bias \(2,\) torch.float32, group 0 where this script has .*, group 1",
        ),
    ],
)
def test_another_optimizer_is_refused_whatever_the_strategy(own, difference):
    store = dist.HashStore()
    tell_model(store, described())
    with pytest.raises(ShoalError, match=difference):
        check_same(store, own)


def test_a_model_with_less_or_more_than_the_run_s_is_another():
    store = dist.HashStore()
    tell_model(store, ["strategy Sync()", "parameter weight (2, 3) torch.float32"])
    check_same(store, ["strategy Sync()", "parameter weight (2, 3) torch.float32"])
    with pytest.raises(ShoalError, match=r"has parameter weight .* where this script has nothing more"):
        check_same(store, ["strategy Sync()"])
    with pytest.raises(ShoalError, match=r"strategy Sync\(\) where this script has strategy BMUF\(\)"):
        check_same(store, ["strategy BMUF()", "parameter weight (2, 3) torch.float32"])
