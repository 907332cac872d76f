"""The demo: three acts one after the other, the last screen, and the page."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from shoal.demo import sentences, tables, terminal
from shoal.demo.drawings import drawings
from shoal.demo.eight_machines import MACHINES, PERIOD, EightMachines, simulate_eight
from shoal.demo.killed import WORKERS, Killed, train_and_kill
from shoal.demo.machine_load import MachineLoad, measure_load
from shoal.demo.page import write_page
from shoal.demo.sentences import Acts
from shoal.demo.this_machine import ThisMachine, train_here
from shoal.report import ProgressDisplay
from shoal.report.files import plain, write_whole
from shoal.studies.study import Lab


@dataclass(frozen=True)
class Size:
    """How large the acts are; the tests make them tiny."""

    widths: tuple[int, int, int] = (768, 256, 128)  # hidden units of the net in each act
    samples: tuple[int, int, int] = (16_000, 32_000, 16_000)  # different ones
    epochs: tuple[int, int, int] = (2, 5, 4)
    tests: int = 2_000
    seconds: float = 55.0  # for the rounds of act 1


@dataclass(frozen=True)
class Demo:
    """Runs the acts. Progress goes to stderr, results to `console`."""

    network: str
    size: Size
    console: Console
    progress: ProgressDisplay

    def run(self) -> Acts:
        """Run all three and show each one's table when it is over."""
        with self.progress:
            load = measure_load()
            self.console.print(sentences.about_load(load))
            return Acts(self.first(load), self.second(), self.third())

    def first(self, load: MachineLoad) -> ThisMachine:
        """This machine, real processes."""
        task = drawings(self.size.widths[0], 0.3, self.size.samples[0], self.size.tests)
        terminal.show_heading(
            self.console,
            "Act 1. This machine: one worker, then two",
            "Real processes of one thread each train the same net on the same digits, drawn in code.",
        )
        here = train_here(Lab(self.progress), load, task, self.size.epochs[0], self.size.seconds)
        self.progress.finish()
        terminal.show_table(self.console, tables.this_machine_table(here))
        return here

    def second(self) -> EightMachines:
        """Eight machines in virtual time."""
        task = drawings(
            self.size.widths[1], 0.4, self.size.samples[1], self.size.tests, noise=0.5, fresh=True
        )
        link = sentences.link_text(self.network)
        terminal.show_heading(
            self.console,
            f"Act 2. {MACHINES} machines on an office link, in virtual time",
            f"Simulated: {link}. The gradients and so the accuracy are real, the times are computed from "
            f"a step measured here. bmuf and diloco average every {PERIOD} steps.",
        )
        eight = simulate_eight(Lab(self.progress), task, self.size.epochs[1], self.network)
        self.progress.finish()
        told = sentences.to_target(eight), sentences.foretold(eight)
        terminal.show_table(self.console, tables.eight_machines_table(eight), *told)
        return eight

    def third(self) -> Killed:
        """Processes that are killed."""
        task = drawings(self.size.widths[2], 0.1, self.size.samples[2], self.size.tests)
        terminal.show_heading(
            self.console,
            "Act 3. Killed in mid-run",
            f"{WORKERS} workers and a server that keeps a journal (asgd): kill -9 for one, then the other.",
        )
        killed = train_and_kill(self.progress, task, self.size.epochs[2])
        self.progress.finish()
        terminal.show_table(self.console, tables.killed_table(killed))
        return killed


def run_demo(network: str, page: Path, figures: Path | None, quiet: bool, size: Size | None = None) -> None:
    """Run the demo, print its last screen and write its files."""
    console = Console(highlight=False)
    acts = Demo(network, size or Size(), console, ProgressDisplay(enabled=not quiet)).run()
    lines = sentences.closing_lines(acts)
    program = sentences.program_name(sys.executable, shutil.which("shoal"), str(Path.cwd()))
    command = sentences.next_command(acts, program)
    write_page(acts, lines, command, page)
    if figures is not None:
        write_whole(figures, json.dumps(plain(asdict(acts)), indent=1, allow_nan=False) + "\n")
    terminal.show_last_screen(console, lines, command, str(page))
