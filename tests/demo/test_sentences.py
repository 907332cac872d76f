"""The demo's sentences follow its figures: other figures, other words."""

from __future__ import annotations

import re

import pytest
from figures import acts, eight, here, killed

from shoal.demo.machine_load import MachineLoad
from shoal.demo.page import page
from shoal.demo.sentences import (
    about_load,
    beside_them,
    closing_lines,
    conclusion,
    eight_machines,
    foretold,
    link_text,
    next_command,
    program_name,
    times,
    to_target,
    two_workers,
)
from shoal.demo.sentences import killed as about_kills
from shoal.demo.tables import eight_machines_table, killed_table, this_machine_table


def test_the_last_screen_has_five_lines():
    assert closing_lines(acts()) == [
        "Two workers on this machine were 1.85 times as fast as one, at the same accuracy.",
        "PyTorch's DDP was 1.29 times as fast as one on the same work; the ceiling, two workers that never "
        "talk, is 1.91 times.",
        "8 machines with links of 250 Mbit/s and 1 ms (virtual time): averaging at every step, as DDP does, "
        "was slower than one machine (0.30 times its speed); on the same samples bmuf 4.6 and diloco 4.5 "
        "times as fast, at the same accuracy.",
        "Worker 2 and the server were killed in mid-run: training went on, the loss fell on from 0.50 to "
        "0.08, and no update was lost.",
        "So use Shoal where links are slow (here 15.3 times as fast as averaging at every step), on the "
        "cores of one machine (1.43 times as fast as DDP) and where processes may die.",
    ]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"two": 1.0}, "were no faster than one (1.00 times), at the same accuracy"),
        ({"two": 0.8}, "were slower than one (0.80 times its speed)"),
        ({"accuracies": (97.0, 99.1)}, "1.85 times as fast as one, 2.1 points less accurate"),
        ({"accuracies": (99.9, 99.1)}, "0.8 points more accurate"),
    ],
)
def test_two_workers_that_do_not_pay_are_not_praised(figures, words):
    assert words in two_workers(here(**figures))


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"ddp": 0.7}, "DDP was slower than one (0.70 times its speed)"),
        (
            {"two": 1.1, "apart": 1.2, "load": MachineLoad(1, 0.0)},
            "is 1.20 times, because there is only one core",
        ),
        (
            {"two": 1.1, "apart": 1.2, "load": MachineLoad(2, 0.6)},
            "because other programs use 60 % of the cores",
        ),
        ({"two": 1.1, "apart": 1.2, "load": MachineLoad(2, None)}, "because the cores slow each other down"),
    ],
)
def test_a_low_ceiling_has_its_reason(figures, words):
    assert words in beside_them(here(**figures))


def test_a_ceiling_below_what_was_reached_is_not_believed():
    uneven = here(apart=1.2, load=MachineLoad(2, 0.9))
    assert "less than two that do: the machine was too uneven to measure" in beside_them(uneven)


def test_a_fast_sync_is_said_to_be_fast():
    fast = eight({"sync": 5.0})
    assert "as DDP does, was 5.0 times as fast as one machine" in eight_machines(fast)
    assert "where links are slow" not in conclusion(acts(eight=fast))
    inaccurate = eight({"sync": 5.0}, {"sync": 60.0})
    assert "where links are slow (here 0.9" not in conclusion(acts(eight=inaccurate))


def test_accuracy_that_is_lost_is_told():
    assert "at 99.5 % and 92.0 % accuracy instead of 99.6 %" in eight_machines(eight({}, {"diloco": 92.0}))


def test_what_was_predicted_stands_beside_what_came_of_it():
    told = foretold(eight())
    assert told.startswith("The formulas of shoal plan had predicted single 11.0 s, sync 36.7 s, ")
    assert told.endswith("before anything ran: off by 10 % at most.")


def test_the_time_to_the_same_accuracy_is_told():
    assert to_target(eight()) == (
        "99 % of the test digits were read correctly by one machine after 9.94 s, sync never, bmuf after "
        "2.16 s, diloco after 2.21 s of virtual time."
    )
    assert eight({}, {"diloco": 92.0}).target == 91.5


def test_a_loss_that_rises_and_an_update_that_is_lost_are_told():
    assert "the loss rose from 0.50 to 0.90" in about_kills(killed(last=0.9))
    assert "no update was lost" not in about_kills(killed(faults=("every update after that one was lost",)))
    assert about_kills(killed(kills=1)).startswith("Worker 2 was killed in mid-run")
    assert "too soon" in about_kills(killed(kills=0))
    assert "may die" not in conclusion(acts(killed=killed(last=0.9)))


def test_a_conclusion_needs_a_gain():
    nothing = acts(here=here(two=1.0), eight=eight({"sync": 6.0}), killed=killed(kills=0))
    assert conclusion(nothing) == "In this run Shoal gained nothing over DDP."
    assert "cores of one machine" not in conclusion(acts(here=here(apart=1.1)))


def test_the_next_command_names_what_was_fastest_here():
    assert next_command(acts(), "shoal") == "shoal run -n 2 --strategy bmuf --strategy.period 16 train.py"
    many = acts(here=here(ddp=1.95, load=MachineLoad(8, 0.0)))
    assert next_command(many, ".venv/bin/shoal") == ".venv/bin/shoal run -n 8 --strategy sync train.py"


def test_the_program_is_called_by_its_name_where_that_works():
    assert program_name("/env/bin/python", "/env/bin/shoal", "/home") == "shoal"
    assert program_name("/home/.venv/bin/python", None, "/home") == ".venv/bin/shoal"
    assert program_name("/env/bin/python", "/usr/bin/shoal", "/home") == "/env/bin/shoal"


def test_a_busy_machine_is_pointed_out():
    assert about_load(MachineLoad(2, 0.03)) == "This machine has 2 cores; other programs use 3 % of them."
    assert "Expect lower speed-ups" in about_load(MachineLoad(2, 0.5))
    assert "1 core; " in about_load(MachineLoad(1, 0.0)) and "cannot be faster" in about_load(
        MachineLoad(1, 0.0)
    )
    assert "does not say" in about_load(MachineLoad(4, None))


def test_links_and_ratios_as_text():
    assert link_text("1Gbit,100us,1%") == "links of 1000 Mbit/s and 0.1 ms, losing 1 %"
    assert link_text("20ms") == "links of unlimited bandwidth and 20 ms"
    assert [times(ratio) for ratio in (0.304, 1.849, 2.999, 12.34, 123.4)] == [
        "0.30", "1.85", "3.0", "12.3", "123"
    ]  # fmt: skip


def test_tables_show_the_spread_of_the_rounds():
    rows = {row[0]: row[1:] for row in this_machine_table(here()).rows}
    assert rows["two workers, bmuf"] == ("5.41", "1.85", "1.80 to 1.87", "98.9 %")
    assert rows["two that never talk"][-1] == "–"
    assert eight_machines_table(eight()).rows[1][-1] == "–"  # sync never got there
    assert killed_table(killed()).rows[-1] == ("last step", "10.0", "0.08")


def test_the_page_holds_the_lines_the_command_and_a_chart_for_each_act():
    lines = closing_lines(acts())
    text = page(acts(), lines, "shoal run -n 2 train.py")
    assert all(line.replace("'", "&#x27;") in text for line in lines)
    assert "<pre>shoal run -n 2 train.py</pre>" in text
    assert text.count('<svg class="chart') == 4
    assert "virtual" in text and "the server killed, after 6.00 s" in text
    assert not re.search(r"(?:src|href)=", text)  # nothing is loaded from elsewhere
