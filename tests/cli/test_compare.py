"""`shoal compare`: one task, several strategies; nothing that was finished is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.api.run import run
from shoal.cli import comparison
from shoal.cli.compare import check_strategies
from shoal.core.codec import Identity
from shoal.core.errors import Interrupted, WorkerFailed
from shoal.core.task import Task
from shoal.programs.tasks import TASKS
from shoal.runs.plan import Plan
from shoal.sim import Compute, Network
from shoal.strategies import BMUF, Local, Single, Sync

KEYS = {
    *("strategy", "codec", "transport", "workers", "test_accuracy", "test_loss", "seconds", "samples"),
    *("samples_per_second", "bytes_sent", "wait_fraction", "saved_seconds", "staleness_mean"),
    *("config", "task"),
    *("parameters", "curve", "staleness", "nodes", "metrics", "digest", "final", "legs", "seconds_to_goal"),
    "memory",
}


def runs_in(file: Path) -> list[dict]:
    return json.loads(file.read_text())["runs"]


class Calls(list):
    """The runs that were asked for, none of which takes place; the second raises `problem` if it is set."""

    problem = None

    def __init__(self, result):
        super().__init__()
        self.result = result

    def __call__(self, **settings):
        self.append(settings)
        if len(self) == 2 and self.problem:
            raise self.problem
        return self.result


@pytest.fixture(scope="module")
def result():
    return run("digits", "single", transport="sim")


@pytest.fixture
def calls(monkeypatch, result):
    calls = Calls(result)
    monkeypatch.setattr(comparison, "run", calls)
    return calls


@pytest.mark.slow
@pytest.mark.soak  # tests/layouts has each of them
def test_layouts_on_the_same_processes_reach_the_same_accuracy(shoal, tmp_path):
    line = "compare --quiet --task digits --strategies single,sync -n 2 --epochs 1"
    line += " --layouts data,tensor,pipeline:schedule=gpipe,microbatches=4 --split 1-2"
    result = shoal(line, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.stderr
    single, data, tensor, pipeline = runs_in(tmp_path / "out.json")
    assert [one["workers"] for one in (single, data, tensor, pipeline)] == [1, 2, 1, 1]
    assert "layout" not in single["config"] and "layout" not in data["config"]
    assert tensor["config"]["layout"] == "tensor:group=2"
    assert pipeline["config"]["layout"] == "pipeline:group=2,schedule=gpipe,microbatches=4,split=1-2"
    assert data["config"]["batch"] == 32 and tensor["config"]["batch"] == pipeline["config"]["batch"] == 64
    for one in (tensor, pipeline):
        assert one["test_loss"] == pytest.approx(data["test_loss"], abs=1e-5)
        assert one["test_accuracy"] == data["test_accuracy"]
        assert one["memory"] > 0
    for words in (
        "1x2",
        "ms a",
        "mem-",
        "sync, tensor",
        "stages of 1-2 layers",
        "the samples/s of whole models",
    ):
        assert words in result.stdout.replace("\n", " ").replace("  ", " ")


def test_layouts_in_virtual_time_are_refused(shoal):
    result = shoal("compare --strategies sync -n 2 --layouts data,tensor --sim")
    assert result.exit_code == 2 and "`shoal split` shows a step of every one" in result.stderr


@pytest.mark.slow
def test_two_strategies_in_virtual_time(shoal, tmp_path):
    line = "compare --quiet --strategies single,bmuf -n 3 --epochs 1 --seed 4 --sim"
    files = ("--json", tmp_path / "new" / "out.json", "--report", tmp_path / "out.html")
    line += " --network 100Mbit,1ms --compute 10ms --strategy.period=8 --codec fp16 --batch 16 --lr 0.2"
    result = shoal(line, *files)
    assert result.exit_code == 0, result.stderr
    single, bmuf = runs_in(tmp_path / "new" / "out.json")
    assert single.keys() == bmuf.keys() == KEYS
    assert (single["strategy"], single["workers"], single["codec"]) == ("single", 1, "none")
    assert (bmuf["strategy"], bmuf["workers"], bmuf["codec"]) == ("bmuf", 3, "fp16")
    assert single["transport"] == bmuf["transport"] == "sim"
    asked = {"strategy.period": 8, "seed": 4, "epochs": 1, "batch": 16, "lr": 0.2, "task": "digits"}
    assert asked.items() <= bmuf["config"].items()
    assert bmuf["config"]["network"]["latency"] == 0.001 and bmuf["config"]["compute"]["mean"] == 0.01
    assert single["seconds"] == pytest.approx(0.01 * 90)  # 1,437 samples in batches of 16
    assert "<svg" in (tmp_path / "out.html").read_text()
    assert "bmuf + fp16" in result.stdout and "virtual" in result.stdout
    assert result.stdout.endswith(f"report: {tmp_path / 'out.html'}\njson: {tmp_path / 'new' / 'out.json'}\n")
    assert max(len(row) for row in result.stdout.splitlines()[:8]) <= 80
    assert result.stderr == ""


@pytest.mark.slow
def test_the_same_on_real_processes(shoal, tmp_path):
    file = tmp_path / "out.json"
    result = shoal("compare --strategies sync -n 2 --epochs 1 --json", file)
    assert result.exit_code == 0, result.stderr
    (sync,) = runs_in(file)
    assert (sync["transport"], sync["workers"], sync["samples"]) == ("processes", 2, 1437)
    assert sync["test_accuracy"] > 30


def test_an_option_goes_to_every_strategy_that_has_it(shoal, calls):
    line = "compare --strategies single,sync,local,bmuf -n 2 --strategy.period 8 --strategy.reset-momentum no"
    assert shoal(line).exit_code == 0
    assert [call["strategy"] for call in calls] == [
        Single(), Sync(), Local(period=8, reset_momentum=False), BMUF(period=8, reset_momentum=False)
    ]  # fmt: skip


def test_single_has_one_worker_whatever_n_is(shoal, calls):
    shoal("compare --strategies single,sync -n 5 --collective native --transport gloo")
    assert [(call["workers"], call["collective"]) for call in calls] == [(1, "auto"), (5, "native")]


def test_settings_reach_the_run(shoal, calls, tmp_path):
    line = (
        "compare --strategies sync --transport gloo --timeout 7 --every 3 --collective stripes --checkpoint"
    )
    assert shoal(line, tmp_path).exit_code == 0
    (call,) = calls
    assert {"transport": "gloo", "timeout": 7.0, "every": 3, "collective": "stripes"}.items() <= call.items()
    assert call["checkpoint"] == str(tmp_path / "sync")
    assert "network" not in call


def test_the_rule_for_the_learning_rate_reaches_every_run(shoal, calls):
    assert shoal("compare --strategies single,sync --sim --scale-lr auto").exit_code == 0
    assert [call["scale_lr"] for call in calls] == ["auto", "auto"]


def test_a_device_reaches_every_run(shoal, calls, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(Task, "on", lambda task, device: replace(task, device=device))
    assert shoal("compare --task digits --strategies single,sync --device auto").exit_code == 0
    assert [call["task"].device for call in calls] == ["cuda", "cuda"]


def test_a_gpu_that_is_not_there_is_refused(shoal, calls, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = shoal("compare --task digits --device cuda")
    assert (done.exit_code, calls) == (2, [])
    assert "torch finds no GPU here; take 'cpu', or 'auto'" in done.stderr


def test_an_unknown_rule_is_refused_with_the_nearest(shoal, calls):
    result = shoal("compare --strategies sync --scale-lr squared")
    assert result.exit_code == 2 and "unknown scale-lr 'squared'. Did you mean 'sqrt'?" in result.stderr
    assert calls == []


def test_the_title_of_a_run_names_its_scaled_rate():
    task = TASKS.make("digits").but(batch=8)
    plan = Plan(task, Sync(), Identity(), workers=4, scale_lr="auto")
    assert comparison.told(plan, task.data()) == "4 workers, lr 1.2 (4 x 0.3)"
    assert comparison.told(replace(plan, scale_lr="none"), task.data()) == "4 workers"


@pytest.mark.slow
def test_scaled_rates_are_shown_in_the_table_and_in_the_figures(shoal, tmp_path):
    line = "compare --strategies single,sync,asgd -n 4 --epochs 2 --batch 8 --sim --scale-lr auto --target 80"
    result = shoal(line, "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    assert "lr 1.2 (4 x 0.3)" in " ".join(result.stdout.split()) and "80.00 %" in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["goal"] == {"score": "test_accuracy", "value": 80.0, "given": True}
    rates = [(run["config"]["lr"], run["config"]["lr_factor"]) for run in written["runs"]]
    assert rates == [(0.3, 1.0), (1.2, 4.0), (0.3, 1.0)]


@pytest.mark.slow
def test_a_lower_end_for_want_of_steps_is_explained_with_the_command_to_try(shoal):
    line = "compare --quiet --strategies single,sync -n 4 --epochs 2 --sim"
    told = shoal(line).stdout
    assert "With 4 workers, 2 epochs are 24 steps for each instead of 90, 3.75 times fewer." in told
    assert f"Try: shoal {line} --scale-lr auto --epochs 4\n" in told


def test_virtual_time_has_a_network_even_if_none_is_named(shoal, calls):
    shoal("compare --strategies sync --transport processes --sim")
    assert calls[0]["transport"] == "sim"
    assert calls[0]["network"] == Network.parse("1Gbit,100us")
    assert calls[0]["compute"] == Compute.parse("20ms")


def test_a_period_too_long_for_the_run_is_pointed_out(shoal, calls):
    result = shoal("compare --strategies local,bmuf")  # 60 steps
    assert (
        result.stderr
        == "note: bmuf merges every 50 steps, but each worker takes only 60; try --strategy.period 6\n"
    )


@pytest.mark.slow
@pytest.mark.soak  # tests/strategies/test_ensemble.py has it alone
def test_an_ensemble_beside_the_rest(shoal, tmp_path):
    line = "compare --quiet --strategies single,sync,local,ensemble -n 3 --epochs 2 --sim --codec fp16"
    result = shoal(line, "--json", tmp_path / "out.json", "--report", tmp_path / "out.html")
    assert result.exit_code == 0
    assert "ensemble: " in result.stdout and "0 B sent" in result.stdout
    *_, ensemble = runs_in(tmp_path / "out.json")
    assert (ensemble["strategy"], ensemble["codec"], ensemble["bytes_sent"]) == ("ensemble", "none", 0)
    assert ensemble["samples"] == 2 * 1437 and ensemble["test_accuracy"] > 50
    assert "ensemble" in (tmp_path / "out.html").read_text()


@pytest.mark.slow
def test_a_batch_that_grows_is_noted_in_the_figures(shoal, tmp_path):
    line = "compare --quiet --strategies sync -n 2 --epochs 2 --sim --batch 16"
    growth = ("--grow-batch", "2@1", "--largest-batch", "24")
    assert shoal(line, *growth, "--json", tmp_path / "out.json").exit_code == 0
    (run,) = runs_in(tmp_path / "out.json")
    assert (run["config"]["grow_batch"], run["config"]["largest_batch"]) == ("2@1", 24)
    assert run["nodes"][0]["steps"] == 45 + 30


@pytest.mark.slow
def test_a_crew_that_grows_beside_the_full_one_tells_what_it_saved(shoal, tmp_path):
    line = "compare --strategies single,sync -n 4 --crew 1@0,2@20,4@30 --epochs 2 --sim"
    result = shoal(line, "--json", tmp_path / "out.json", "--report", tmp_path / "out.html")
    assert result.exit_code == 0
    single, full, grown = runs_in(tmp_path / "out.json")
    assert [run["config"]["crew"] for run in (single, full, grown)] == [None, None, "1@0,2@20,4@30"]
    assert [leg["workers"] for leg in grown["legs"]] == [1, 2, 4] and full["legs"] == []
    fewer = round(100 * (1 - grown["bytes_sent"] / full["bytes_sent"]))
    assert fewer > 10
    told = result.stdout.replace("\n", " ")
    grew = "began with 1 worker, 2 from step 20, 4 from step 30"
    assert f"{grew}: {fewer} % fewer bytes and" in told
    assert "worker-seconds than 4 workers from the beginning" in told
    assert "1-4" in told and "sync (crew=full)" in told
    page = (tmp_path / "out.html").read_text()
    assert page.count("2 to 4 workers</title>") == 4  # on each of four charts


def test_what_a_crew_saves_is_computed_where_nothing_was_measured(shoal, tmp_path):
    line = "compare --quiet --strategies sync --crew 1@0,4@30 --epochs 2 --sim"
    result = shoal(line, "--json", tmp_path / "out.json")
    (run,) = runs_in(tmp_path / "out.json")
    first, last = run["legs"]
    assert first["bytes_sent"] == 0  # one worker has nobody to send to
    share = last["samples"] / run["samples"]
    told = result.stdout.replace("\n", " ")
    assert f"{100 * (1 - share):.0f} % fewer bytes than 4 workers from the beginning (computed" in told


def test_a_schedule_with_a_slip_is_refused_in_a_sentence(shoal):
    result = shoal("compare --strategies sync --grow-batch 2x10")
    assert result.exit_code == 2
    assert "'2x10' in grow_batch '2x10' is not a factor and an epoch, as in 2@10" in result.stderr


def test_a_switch_that_never_comes_is_noted(shoal, calls):
    result = shoal("compare --quiet --sim --strategies post_local -n 4")
    note = "post_local switches after 100 steps, but each worker takes only 60; try --strategy.switch 30"
    assert result.stderr == f"note: {note}\n"


def test_a_failure_stops_it_but_loses_nothing(shoal, calls, tmp_path):
    calls.problem = WorkerFailed("worker 1 failed: boom", "Traceback")
    file = tmp_path / "out.json"
    result = shoal("compare --strategies single,sync,local --json", file)
    assert result.exit_code == 1
    assert result.stderr == "Traceback\nshoal: sync: worker 1 failed: boom\n"
    assert [r["strategy"] for r in runs_in(file)] == ["single"]
    assert f"json: {file}" in result.stdout and "single" in result.stdout
    assert len(calls) == 2


def test_ctrl_c_tells_where_the_checkpoint_is(shoal, calls, tmp_path):
    calls.problem = Interrupted("x")
    (tmp_path / "sync" / "step-00000003").mkdir(parents=True)
    result = shoal("compare --strategies single,sync --checkpoint", tmp_path)
    assert result.exit_code == 130
    checkpoint = tmp_path / "sync"
    sentence = f"stopped by Ctrl-C. The checkpoint is in {checkpoint}; the same command resumes from it."
    assert result.stderr == f"shoal: {sentence}\n"
    assert "single" in result.stdout


def test_ctrl_c_without_checkpoint_says_so(shoal, calls):
    calls.problem = Interrupted("x")
    result = shoal("compare --strategies single,sync")
    assert result.exit_code == 130 and "No checkpoint was saved" in result.stderr


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_is_found_before_the_first_run(shoal, tmp_path):
    line = "compare --sim --epochs 1 --every 20 --strategies single,sync -n 2 --checkpoint"
    assert shoal(line, tmp_path).exit_code == 0
    result = shoal(line, tmp_path, "--lr", 0.7)
    assert result.exit_code == 1
    assert "belongs to another run: lr=0.3 (now 0.7)" in result.stderr
    assert result.stdout == ""


def test_several_numbers_of_workers_are_several_runs_of_each_strategy_but_single(shoal, calls, tmp_path):
    shoal("compare", "--strategies", "single,sync,local", "-n", "4,2", "--sim", "--checkpoint", str(tmp_path))
    made = [(type(c["strategy"]), c["workers"], Path(c["checkpoint"]).name) for c in calls]
    assert made == [
        (Single, 1, "single"),
        (Sync, 2, "sync-2"),
        (Sync, 4, "sync-4"),
        (Local, 2, "local-2"),
        (Local, 4, "local-4"),
    ]


@pytest.mark.parametrize("text", ["four", "1.5", "-2", ""])
def test_numbers_of_workers_that_are_none_are_refused(shoal, text):
    done = shoal("compare", f"--workers={text}")
    assert done.exit_code != 0 and "is not a number, or several separated by commas" in done.output


def test_options_may_follow_a_strategy_and_count_more_than_those_for_all():
    chosen = check_strategies("sync,local:period=4,local,bmuf:period=2,momentum=0.5", {"period": "8"})
    assert chosen == {
        "sync": {},
        "local:period=4": {"period": 4},
        "local": {"period": 8},
        "bmuf:period=2,momentum=0.5": {"period": 2, "momentum": 0.5},
    }


def test_two_settings_of_a_strategy_are_two_runs(shoal, tmp_path):
    file = tmp_path / "out.json"
    result = shoal(
        f"compare --strategies local:period=2,local:period=4 -n 2 --sim --epochs 1 --json {file} --quiet"
    )
    assert result.exit_code == 0, result.stderr
    assert [run["config"]["strategy.period"] for run in runs_in(file)] == [2, 4]
