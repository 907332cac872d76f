"""The closing table and the sentences below it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shoal.report import closing_table, verdict
from shoal.report.goal import Goal, goal_of
from shoal.report.reading import run_names
from shoal.report.units import MISSING, bytes_text, count_text, percent_text, ratio_text, seconds_text
from shoal.report.verdicts import headline


def drawn(records, width=80, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(closing_table(records))
    return console.file.getvalue()


def row(text, name):
    return next(line for line in text.splitlines() if line.split() and line.split()[0] == name)


def test_rows_keep_the_order_of_the_runs(runs):
    text = drawn(runs)
    assert [text.index(name) for name in ("single", "bmuf", "sync", "downpour")] == sorted(
        text.index(name) for name in ("single", "bmuf", "sync", "downpour")
    )


def test_a_row_holds_the_numbers_with_their_units(runs):
    cells = row(drawn(runs), "bmuf").split()
    # strategy, workers, seconds to 97 %, speed-up, accuracy, seconds, sent, waiting, staleness
    assert cells == ["bmuf", "4", "10.0", "2.9", "x", "97.00", "10.0", "12.4", "MB", "12", "%", MISSING]
    assert row(drawn(runs), "downpour").split()[-1] == "1.0"


def test_the_codec_is_named_and_none_is_not(runs):
    text = drawn(runs, width=120)
    assert "sync + top_k(0.01)" in text
    assert "none" not in text


def test_everything_fits_in_80_columns(runs, make_run):
    wide = make_run(
        "parameter_averaging", codec="chain(top_k(0.01), quantize(8))", samples_per_second=1_234_567.0
    )
    lines = drawn([*runs, wide]).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_numbers_end_in_one_column(runs):
    rows = [row(drawn(runs), name) for name in ("single", "bmuf", "downpour")]
    assert (
        len(
            {
                line.index(speed) + len(speed)
                for line, speed in zip(rows, ("1.0 x", "2.9 x", "2.9 x"), strict=True)
            }
        )
        == 1
    )


def test_only_the_best_accuracy_is_highlighted(runs):
    text = drawn(runs, color_system="standard", force_terminal=True)
    marked = [line for line in text.splitlines() if "\x1b[1;32m" in line]
    assert marked
    assert all("sync" in line or "top_k" in line for line in marked)  # 97.41, the highest


def test_time_is_called_virtual_only_if_all_of_it_is(runs):
    assert "virtual" not in drawn(runs)
    assert "virtual" in drawn([{**run, "transport": "sim"} for run in runs])
    mixed = drawn([*runs, {**runs[1], "transport": "sim"}])
    assert "10.0v" in mixed


def test_the_learning_rate_has_a_column_if_runs_differ_in_it(runs):
    assert " lr " not in drawn(runs)
    faster = {**runs[1], "config": {**runs[1]["config"], "lr": 0.48}}
    text = drawn([runs[0], faster])
    assert " lr " in text and "0.48" in row(text, "bmuf").split()


def test_the_end_is_a_mean_with_its_spread(make_run):
    curve = [
        {"seconds": float(t), "samples": 100 + t, "test_accuracy": a, "test_loss": 0.1}
        for t, a in enumerate((96.0, 97.0, 98.0))
    ]
    assert "97.00 ± 1.00" in row(drawn([make_run("bmuf", curve=curve)]), "bmuf")


def test_a_task_without_classes_is_judged_by_its_loss(make_run):
    runs = [make_run("single", 1, test_accuracy=None, test_loss=0.2, seconds=20.0)]
    runs += [make_run("bmuf", test_accuracy=None, test_loss=0.1)]
    text = drawn(runs)
    assert "acc. %" not in text and "0.200" in text.splitlines()[1]
    assert row(text, "bmuf").split()[:6] == ["bmuf", "4", "10.0", "2.0", "x", "0.100"]
    assert "2.0 x as fast as one worker to 0.200, ends at test loss 0.1 against 0.2" in " ".join(text.split())


def test_columns_without_a_value_are_left_out(make_run):
    text = drawn([make_run("bmuf"), make_run("sync")])
    assert "speed-" not in text
    assert "stale-" not in text


def test_missing_numbers_are_dashes(make_run):
    run = make_run("bmuf", test_accuracy=None, test_loss=float("nan"), seconds=None, wait_fraction=None)
    assert row(drawn([run]), "bmuf").split()[:4] == ["bmuf", "4", MISSING, MISSING]


def test_markup_in_a_name_is_shown_as_it_is(make_run):
    assert "[red]x" in drawn([make_run("[red]x")])


def test_no_runs_make_an_empty_table():
    assert "run" in drawn([])


def test_verdict_of_a_run_that_pays(runs):
    assert verdict(runs[1], runs[0], goal=goal_of(runs)) == (
        "bmuf: 2.9 x as fast as one worker to 97.00 %, ends 0.4 points below it; "
        "12 % of the time waiting, mostly for worker 3."
    )


def test_verdict_says_plainly_that_it_is_slower(runs):
    assert verdict(runs[2], runs[0], goal=goal_of(runs)) == (
        "sync + top_k(0.01): slower than one worker, 0.62 x as fast to 97.00 %, ends at the same accuracy, "
        "so distribution did not pay; 61 % of the time waiting."
    )


def test_verdict_names_the_server_that_was_waited_for(runs):
    assert verdict(runs[3], runs[0]).endswith("mostly for the server.")


def test_verdict_names_one_of_several_servers(make_run, make_node):
    nodes = [make_node(0, waited_for={"3": 9.0, "2": 1.0}), make_node(2, "server"), make_node(3, "server")]
    assert verdict(make_run("easgd", 2, nodes=nodes)).endswith("mostly for server 1.")


def test_verdict_names_nobody_if_all_were_waited_for_alike(make_run, make_node):
    nodes = [make_node(0, waited_for={"1": 1.0, "2": 1.0}), make_node(1, waited_for={"0": 1.0})]
    assert "mostly" not in verdict(make_run("sync", 3, nodes=nodes))


def test_verdict_says_but_when_speed_costs_accuracy(runs, make_run):
    sentence = verdict(make_run("bmuf", test_accuracy=90.4), runs[0], goal=Goal("test_accuracy", 90.0, False))
    assert "2.9 x as fast as one worker to 90.00 %, but ends 7.0 points below it" in sentence


def test_verdict_of_an_even_run_is_no_faster(runs, make_run):
    even = make_run("bmuf", seconds=28.5)
    assert "no faster than one worker, 1.0 x as fast to 97.00 %" in verdict(even, runs[0], goal=goal_of(runs))


def test_verdict_without_evaluations_goes_by_samples_per_second(runs):
    unseen = [{**run, "curve": []} for run in runs]
    assert goal_of(unseen) is None
    assert "2.9 x the samples/s of one worker, ends 0.4 points below it" in verdict(unseen[1], unseen[0])


def test_verdict_tells_who_did_not_reach_the_goal(runs, make_run):
    high = Goal("test_accuracy", 97.4, given=True)
    assert "bmuf: did not reach 97.40 %, ends 0.4 points below one worker" in verdict(
        runs[1], runs[0], goal=high
    )
    higher = Goal("test_accuracy", 98.0, given=True)
    first = verdict(make_run("bmuf", test_accuracy=98.2), runs[0], goal=higher)
    assert "reached 98.00 % after 10.0 s, and one worker did not, ends 0.8 points above it" in first
    assert "97.40 % test accuracy, 98.00 % never" in verdict(runs[0], runs[0], goal=higher)


def resumed(run):
    """The same run, whose first half was done before."""
    nodes = [{**node, "samples_before": node["samples"] // 2} for node in run["nodes"]]
    return {**run, "nodes": nodes}


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_no_time_or_speed_is_claimed_of_what_a_resumed_run_has_left(runs, which):
    pair = [resumed(run) if index in which else run for index, run in enumerate(runs[:2])]
    goal, text = goal_of(pair), drawn(pair)
    assert [goal.seconds(run) is None for run in pair] == [index in which for index in range(2)]
    assert goal.speed_up(pair[1], pair[0]) is None
    assert "as fast" not in text
    assert text.count("resumed; how long it took in all is not known") == len(which)
    for index, name in enumerate(("single", "bmuf")):
        cells = row(text, name).split()
        assert (cells[2] == MISSING) is (index in which)
        assert (pair[index]["seconds"] in map(plain_number, cells)) is (index not in which)
    names = " and ".join(("single", "bmuf")[index] for index in which)
    assert headline(pair).startswith(f"which run was first at 97.00 % is not known, as {names} resumed")


def plain_number(cell):
    return float(cell) if cell.replace(".", "").isdigit() else None


def test_verdict_of_a_resumed_run_says_since_when_its_seconds_are(runs):
    assert verdict(resumed(runs[0]), goal=goal_of(runs)) == (
        "single: resumed; how long it took in all is not known; 97.40 % test accuracy, 29.0 s since then on "
        "one worker, 1,000 samples/s."
    )
    sentence = verdict(resumed(runs[1]), runs[0], goal=goal_of(runs))
    assert sentence.startswith(
        "bmuf: resumed; how long it took in all is not known; ends 0.4 points below one worker; "
    )
    sentence = verdict(runs[1], resumed(runs[0]), goal=goal_of(runs))
    assert sentence.startswith(
        "bmuf: reached 97.00 % after 10.0 s, ends 0.4 points below one worker; the run on one worker was "
        "resumed; "
    )


def test_a_run_that_was_done_before_has_no_speed(runs):
    done = {**resumed(runs[1]), "samples_per_second": 0.0, "seconds": 0.0, "curve": []}
    assert "distribution did not pay" not in verdict(done, runs[0])


def test_verdict_names_the_scaled_rate(runs):
    scaled = {**runs[1], "config": {**runs[1]["config"], "lr": 0.4, "lr_factor": 4.0}}
    assert "; lr 0.4 (4 x 0.1); " in verdict(scaled, runs[0])
    assert " lr " not in verdict(runs[1], runs[0])


def test_verdict_without_a_baseline_states_what_was_reached(make_run):
    assert "97.00 % test accuracy, 10.0 s on 4 workers, 2,560 samples/s; no single run" in verdict(
        make_run("bmuf")
    )


def test_verdict_of_the_baseline_does_not_compare_it_with_itself(runs):
    assert (
        verdict(runs[0], runs[0]) == "single: 97.40 % test accuracy, 29.0 s on one worker, 1,000 samples/s."
    )


def test_verdict_falls_back_on_the_loss(make_run):
    regress = [make_run(word, test_accuracy=None) for word in ("bmuf", "single")]
    assert "ends at test loss 0.1 against 0.1" in verdict(*regress)


def test_verdict_tells_that_a_run_diverged(runs):
    assert verdict({**runs[1], "test_loss": float("nan")}, runs[0]).startswith("bmuf: diverged")


def test_simulated_runs_are_not_measured_against_real_ones(runs):
    simulated = {**runs[1], "transport": "sim"}
    assert "no single run to compare it with" in " ".join(drawn([runs[0], simulated], width=200).split())


def test_runs_of_one_name_are_told_apart_by_their_settings(make_run):
    often = make_run("bmuf")
    rarely = make_run("bmuf", config={**often["config"], "period": 100})
    assert run_names([often, rarely, make_run("sync")]) == ["bmuf (period=50)", "bmuf (period=100)", "sync"]
    assert run_names([often, often]) == ["bmuf #1", "bmuf #2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(999.6), "1.00 kB"),
        (bytes_text(12_345_678), "12.3 MB"),
        (bytes_text(999_999_999), "1.00 GB"),
        (bytes_text(None), MISSING),
        (count_text(10_200.4), "10,200"),
        (count_text(12_345_678), "12.3 M"),
        (seconds_text(0.01234), "0.0123"),
        (seconds_text(99.96), "100"),
        (seconds_text(12_345), "12,345"),
        (percent_text(0.124), "12 %"),
        (percent_text(0.001), "<1 %"),
        (percent_text(0), "0 %"),
        (ratio_text(2.94), "2.9 x"),
        (ratio_text(0.617), "0.62 x"),
        (ratio_text(0.999), "1.0 x"),
        (ratio_text(14.2), "14 x"),
    ],
)
def test_numbers_as_people_write_them(text, expected):
    assert text == expected


def test_servers_keep_their_numbers_when_a_worker_was_killed(make_run, make_node):
    nodes = [make_node(0, waited_for={"4": 9.0}), make_node(3, "server"), make_node(4, "server")]
    run = make_run("easgd", 2, nodes=nodes, config={"workers": 3})
    assert verdict(run).endswith("mostly for server 1.")
