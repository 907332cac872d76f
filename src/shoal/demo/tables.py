"""The figures of the acts as tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shoal.demo.eight_machines import EightMachines
from shoal.demo.killed import Killed
from shoal.demo.sentences import times
from shoal.demo.this_machine import APART, DDP, ONE, TWO, ThisMachine
from shoal.report.units import MISSING, bytes_text, decimal_text, percent_text, seconds_text


@dataclass(frozen=True)
class TextTable:
    """Headers and rows of text; the first column is the row's name."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def this_machine_table(here: ThisMachine) -> TextTable:
    """Act 1: seconds and speed-up are medians of the rounds, with the lowest and the highest."""
    rows = []
    for kind in (ONE, TWO, DDP, APART):
        ratios = here.speed_ups(kind)
        spread = f"{times(min(ratios))} to {times(max(ratios))}" if len(ratios) > 1 else "one round"
        spread = "" if kind == ONE else spread
        accuracy = here.accuracy(kind)
        rows.append(
            (
                kind,
                seconds_text(median(trials[kind].seconds for trials in here.rounds)),
                times(here.speed_up(kind)),
                spread,
                MISSING if accuracy is None else f"{decimal_text(accuracy, 1)} %",
            )
        )
    return TextTable(("", "seconds", "speed-up", "in all rounds", "accuracy"), rows)


def eight_machines_table(eight: EightMachines) -> TextTable:
    """Act 2: all seconds are virtual."""
    rows = []
    for record in eight.records:
        word = str(record["strategy"])
        reached = eight.seconds_to_target(word)
        rows.append(
            (
                {"single": "one machine", "sync": "sync, as DDP"}.get(word, word),
                seconds_text(record["seconds"]),
                times(eight.speed_up(word)),
                percent_text(record["wait_fraction"]),
                bytes_text(record["bytes_sent"]),
                f"{decimal_text(eight.accuracy(word), 1)} %",
                MISSING if reached is None else seconds_text(reached),
            )
        )
    headers = (
        "",
        "virtual s",
        "speed-up",
        "waiting",
        "sent",
        "accuracy",
        f"s to {eight.target:g} %",
    )
    return TextTable(headers, rows)


def killed_table(figures: Killed) -> TextTable:
    """Act 3: the loss at each kill and at the end."""
    rows = [
        (f"{kill.name} killed", seconds_text(kill.seconds), decimal_text(figures.loss_near(kill.seconds)))
        for kill in figures.kills
    ]
    end = max(seconds for seconds, _ in figures.losses)
    rows.append(("last step", seconds_text(end), decimal_text(figures.last_loss)))
    return TextTable(("", "after, s", "loss"), rows)
