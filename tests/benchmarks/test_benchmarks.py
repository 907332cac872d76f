"""The benchmarks run and print the figures that they document. Tests do not judge the figures.

Benchmarks without worker processes run in this interpreter, which saves the start of another.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.errors import DataMissing
from shoal.programs.tasks.recordings import recordings
from shoal.programs.tasks.shakespeare import shakespeare_data

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def last_line(script: str, *arguments: str) -> dict[str, float]:
    """The figures that the script prints as JSON, run in a process of its own, all of them finite."""
    return finite(printed_by(script, *arguments))


def printed_by(script: str, *arguments: str) -> dict[str, Any]:
    """What the script prints as JSON in its last line, run in a process of its own."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return read_last_line(done.stdout)


def read_last_line(printed: str) -> dict[str, Any]:
    """The JSON of the last line."""
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return figures


def finite(figures: dict[str, float]) -> dict[str, float]:
    """The same figures, if all of them are finite."""
    assert all(isfinite(value) for value in figures.values()), figures
    return figures


@pytest.fixture
def in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., dict[str, float]]]:
    """The same in this process, for scripts that start no others."""
    threads = torch.get_num_threads()

    def run(script: str, *arguments: str) -> dict[str, float]:
        spec = importlib.util.spec_from_file_location(f"benchmark_{Path(script).stem}", FOLDER / script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        spec.loader.exec_module(module)
        module.main()
        return finite(read_last_line(capsys.readouterr().out))

    yield run
    torch.set_num_threads(threads)


@pytest.mark.soak
def test_step_time_prints_a_ratio_for_each_model():
    figures = last_line("step_time.py", "--models", "cnn", "--blocks", "2", "--steps", "2")
    assert figures.keys() == {"cnn"}


@pytest.mark.soak
def test_cores_prints_a_share_of_the_ceiling_for_each_strategy():
    once = ("--rounds", "1", "--seconds", "0.01", "--batches", "8")
    figures = printed_by("cores.py", *once, "--strategies", "ddp,bmuf:4")
    assert set(figures) == {"mlp_2m/8"}
    assert set(figures["mlp_2m/8"]) == {"ceiling", "ddp", "bmuf:period=4"}
    assert all(share > 0 for share in figures["mlp_2m/8"].values())


def test_simulator_prints_its_two_figures(in_process):
    figures = in_process(
        "simulator.py", "--events", "2000", "--workers", "10", "--steps", "4", "--repeats", "1"
    )
    assert figures.keys() == {"events_per_second", "easgd_10x4_seconds"}


@pytest.mark.slow
def test_simulator_prints_real_gradients_beside_their_floor(in_process):
    few = ("--events", "2000", "--workers", "4", "--steps", "4", "--repeats", "1")
    figures = in_process("simulator.py", *few, "--task", "digits")
    assert figures["bmuf_4_seconds"] > 0
    assert figures["plain_loop_seconds"] > 0


@pytest.mark.soak
def test_the_methods_since_2024_print_loss_bytes_and_seconds_and_draw_a_picture(tmp_path):
    picture = tmp_path / "picture.svg"
    try:
        shakespeare_data()
    except DataMissing:
        pytest.skip("tinyshakespeare is not on this machine; set SHOAL_DATA")
    some = ("--steps", "4", "--workers", "2", "--seeds", "0", "--only", "sync;demo", "--jobs", "2")
    figures = printed_by("since_2024.py", *some, "--svg", str(picture))
    assert figures.keys() == {f"{m} {key}" for m in ("sync", "demo") for key in ("loss", "bytes", "seconds")}
    assert picture.read_text().count("<circle") == 2


@pytest.mark.soak
def test_block_momentum_prints_three_accuracies(in_process):
    pytest.importorskip("sklearn")
    figures = in_process("mnist_block_momentum.py", "--task", "digits", "--epochs", "1", "--workers", "2")
    assert figures.keys() == {"single", "local", "bmuf"}
    assert all(accuracy <= 100 for accuracy in figures.values())


@pytest.mark.soak
def test_scaled_rates_prints_a_difference_for_each_strategy(in_process):
    pytest.importorskip("sklearn")
    command = ["--task", "digits", "--epochs", "1", "--workers", "2", "--seeds", "0,1"]
    figures = in_process("scaled_rates.py", *command, "--strategies", "sync,asgd")
    assert figures.keys() == {"single", "sync", "asgd"} and figures["single"] == 0


@pytest.mark.soak
def test_lbfgs_prints_iterations_and_seconds_and_its_picture_is_drawn(in_process, tmp_path):
    pytest.importorskip("sklearn")  # and with it scipy
    file, picture = tmp_path / "lbfgs.json", tmp_path / "lbfgs.svg"
    command = ["--task", "digits", "--workers", "2", "--iterations", "30", "--epochs", "2", "--rates", "0.05"]
    figures = in_process("lbfgs.py", *command, "--json", str(file))
    assert {"iterations_shoal", "iterations_torch", "iterations_scipy"} <= figures.keys()
    draw = FOLDER.parent / "docs" / "lbfgs.py"
    subprocess.run([sys.executable, str(draw), str(file), str(picture)], check=True, timeout=100)
    assert "downpour, lr 0.05" in picture.read_text()


@pytest.mark.soak
def test_crews_prints_what_each_strategy_saved_and_its_runs_can_be_drawn(in_process, tmp_path):
    pytest.importorskip("sklearn")
    command = ["--task", "digits", "--epochs", "1", "--crew", "1@0,2@5", "--seeds", "0,1", "--lr", "0.1"]
    runs, drawn = tmp_path / "runs.json", tmp_path / "crews.svg"
    figures = in_process("crews.py", *command, "--strategies", "sync,asgd", "--json", str(runs))
    told = ("points", "bytes", "seconds", "worker_seconds")
    assert figures.keys() == {f"{word}_{name}" for word in ("sync", "asgd") for name in told}
    assert figures["sync_bytes"] < 1
    subprocess.run([sys.executable, FOLDER.parent / "docs" / "crews.py", runs, drawn], check=True)
    assert "1 to 2 workers" in drawn.read_text()


@pytest.mark.soak
def test_central_accuracy_prints_a_difference_for_each_strategy():
    pytest.importorskip("sklearn")
    command = ["--task", "digits", "--epochs", "1", "--workers", "2", "--strategies", "asgd,sync_server"]
    figures = last_line("central_accuracy.py", *command)
    assert figures.keys() == {"asgd", "sync_server"}


@pytest.mark.soak
def test_uneven_prints_a_share_of_the_ideal_for_each_run():
    pytest.importorskip("sklearn")
    command = ["--runs", "sync,sync+balance", "--workers", "2", "--epochs", "1", "--ms", "0.1"]
    assert last_line("uneven.py", *command).keys() == {"sync", "sync+balance"}


@pytest.mark.soak
def test_groups_prints_speed_and_memory_beside_data_parallelism():
    runs = "alexnet_whole_1,alexnet_pipeline_2,alexnet_hybrid_2"
    small = ["--width", "32", "--batch", "8", "--steps", "1", "--microbatches", "2"]
    figures = last_line("groups.py", *small, "--runs", runs)
    assert figures.keys() == {
        f"alexnet_{how}_2_{what}" for how in ("pipeline", "hybrid") for what in ("speed", "memory")
    }


@pytest.mark.soak
def test_parameter_server_prints_its_ratios():
    pytest.importorskip("grpc")
    figures = last_line("parameter_server.py", "--parameters", "200000", "--rounds", "2")
    assert figures.keys() == {
        "shm_pull_over_copy",
        "shm_push_over_copy",
        "grpc_pull_over_tcp",
        "grpc_push_over_tcp",
        "grpc_pull_over_protobuf",
        "grpc_push_over_protobuf",
        "two_shards_over_one",
        "server_memory_ratio",
    }


def test_codec_speed_prints_a_share_of_a_copy_for_each_codec(in_process):
    figures = in_process(
        "codec_speed.py", "--elements", "300000", "--rounds", "2", "--codecs", "bf16,one_bit,ternary"
    )
    assert figures.keys() == {"bf16", "one_bit", "one_bit_none", "ternary", "ternary_none"}


@pytest.mark.soak
def test_chunks_prints_two_frame_errors_and_a_ratio(in_process):
    try:
        recordings()
    except DataMissing as error:
        pytest.skip(str(error))
    command = "--connected 10 --batch 90 --epochs 1 --seeds 0 --layers 1 --width 4"
    assert in_process("chunks.py", *command.split()).keys() == {"whole", "chunks", "speed_up"}


def test_sparse_sums_prints_a_ratio_for_each_case(in_process):
    figures = in_process(
        "sparse_sums.py", "--elements", "20000", "--workers", "2,3", "--rates", "1Gbit", "--latencies", "1ms"
    )
    assert figures.keys() == {"2,1Gbit,1ms", "3,1Gbit,1ms"}
    assert figures["2,1Gbit,1ms"] > 1 > figures["3,1Gbit,1ms"]  # virtual time: it is the same everywhere


@pytest.mark.soak
def test_pipeline_bubble_prints_both_bubbles_and_no_step_is_shorter_than_its_pauses(tmp_path):
    figures = last_line(
        *("pipeline_bubble.py", "--passes", "sleep", "--schedules", "1f1b", "--microbatches", "2"),
        *("--steps", "2", "--json", str(tmp_path / "all.json")),
    )
    assert figures.keys() == {
        "1f1b 2 simulated bubble",
        "1f1b 2 real bubble",
        "1f1b 2 real over simulated step",
    }
    (found,) = json.loads((tmp_path / "all.json").read_text()).values()
    pauses = (2 + 2 - 1) * 2 * (0.005 + 0.010)  # (M + K - 1)(f + b), with two layers in a stage
    assert found["real_seconds"] >= pauses
    assert found["simulated_seconds"] >= pauses


@pytest.mark.soak
def test_search_prints_how_far_each_method_is_ahead_of_random():
    pytest.importorskip("sklearn")
    figures = last_line("search.py", "--epochs", "16", "--seeds", "0")
    assert figures.keys() == {"random, as long as pbt", "asha", "pbt", "pso", "evolution"}


@pytest.mark.soak
def test_a_virtual_storm_loses_no_sample_and_has_two_figures_for_each_seed():
    few = ("--task", "digits", "--epochs", "2", "--seeds", "2", "--workers", "4", "--every", "4")
    figures = printed_by("virtual_storm.py", *few, "--strategies", "bmuf:period=4")["bmuf:period=4"]
    assert figures["kills"] > 2 and figures["samples_lost"] == [0, 0]
    assert [len(values) for values in figures["accuracy"] + figures["loss"]] == [2] * 4
    assert figures["accuracy"][0] != figures["accuracy"][1]  # kills change who does what


def test_a_storm_is_drawn_with_a_row_for_each_worker(tmp_path):
    events = [(0.0, "worker 0", "trains"), (0.1, "worker 1", "trains"), (2.0, "worker 1", "killed")]
    events += [(3.0, "the keeper", "killed"), (4.0, "worker 1", "trains"), (9.0, "the run", "ends")]
    (tmp_path / "storm.json").write_text(json.dumps({"bmuf": events}))
    drawn = tmp_path / "storm.svg"
    script = FOLDER.parent / "docs" / "elastic_picture.py"
    subprocess.run([sys.executable, script, tmp_path / "storm.json", drawn], check=True)
    picture = drawn.read_text()
    assert "2 workers, bmuf" in picture
    assert picture.count('class="killed"') == 3  # two kills, and the legend
    assert picture.count('class="away"') == 2  # worker 1 for two seconds, and the legend


def test_plans_that_have_seen_only_the_beginning(in_process):
    command = ["--task", "digits", "--workers", "2", "--epochs", "2", "--seen", "0.5", "--strategies", "sync"]
    figures = in_process("plan_ahead.py", *command)
    assert figures["median error"] <= figures["largest error"]


@pytest.mark.usefixtures("warm_programs")
def test_averages_prints_the_processor_time_of_each_collective():
    few = ["--workers=2", "--collectives=mapped", "--mib=0.25", "--times=3", "--rounds=1"]
    figures = last_line("averages.py", *few)
    assert figures.keys() == {"2/mapped"}
    assert figures["2/mapped"] > 0


@pytest.mark.soak
def test_stops_prints_seconds_for_each_command_signal_and_number_of_workers():
    options = ("--commands", "loop", "--signals", "SIGTERM", "--workers", "2")
    assert last_line("stops.py", *options).keys() == {"loop SIGTERM 2"}
