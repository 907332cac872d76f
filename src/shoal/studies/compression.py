"""Compression: bytes, time and accuracy of each codec, beside the claims of its paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from shoal.codecs import CODECS
from shoal.profiling.step import measure_step
from shoal.programs.tasks import TASKS
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.runs.result import Result
from shoal.sim import Compute, Network
from shoal.strategies.sync import Sync
from shoal.studies.study import Lab, Study, check_seeds, mean_and_spread


class PublishedCodec(NamedTuple):
    """The claim of a paper about its codec, and how far behind dense training we allow ours to be."""

    codec: str
    says: str
    allowed: float | None  # points of accuracy
    rate: float = 1.0  # factor of the learning rate: a codec with momentum makes longer steps


PUBLISHED = (
    PublishedCodec("fp16", "half the bytes", 0.5),
    PublishedCodec("one_bit", "a bit per element and two means per column; little loss", 0.5),
    PublishedCodec("ternary", "16 times less, 20 at best", 1.0),
    PublishedCodec("qsgd", "unbiased, a few bits per element", 0.5),
    PublishedCodec("low_rank:rank=2", "on par with SGD", 0.5),
    PublishedCodec("threshold", "278 times less, 3 times that with coded gaps", 1.0),
    PublishedCodec("top_k:density=0.001", "–", None),
    PublishedCodec("dgc:density=0.001,warmup=10", "270 to 600 times less; no loss", 0.5, 0.3),
    PublishedCodec("top_k:density=0.001,feedback=none", "the control: no error feedback", None),
)
CONTROL = PUBLISHED[-1].codec
HEADINGS = (
    Heading("codec", "codec"),
    Heading("ratio", "bytes: times fewer", 1),
    Heading("change", "accuracy, points"),
    Heading("speed_up", "step: times faster", 1),
    Heading("says", "paper"),
    Heading("clock", "clock"),
)


@dataclass(frozen=True)
class Compression(Study):
    """Synchronous training with each codec on a slow network: bytes, time and accuracy.

    Virtual time models the measured step and the network, but not encoding and decoding: it shows what a
    codec can save at most. `benchmarks/slow_link.py` measures real links.
    """

    source: ClassVar[str] = "Seide 2014, Strom 2015, Wen 2017, Alistarh 2017, Lin 2018, Vogels 2019"

    task: str = "mnist"
    workers: int = 4
    epochs: int = 2
    seeds: int = 3
    network: str = "100Mbit,1ms"

    def __post_init__(self) -> None:
        check_seeds(self.seeds)

    def run(self, lab: Lab) -> Findings:
        task = TASKS.make(self.task)
        lab.say("measuring a step")
        compute = measure_step(task).compute()
        settings = partial(self._settings, compute)
        dense = [lab.run(f"none, seed {seed}", task, Sync(), **settings(seed)) for seed in range(self.seeds)]
        rows = []
        for published in PUBLISHED:
            codec, changed = CODECS.read(published.codec), replace(task, lr=task.lr * published.rate)
            runs = [
                lab.attempt(f"{published.codec}, seed {seed}", changed, Sync(), codec=codec, **settings(seed))
                for seed in range(self.seeds)
            ]
            rows.append(row(published, runs, dense))
        return Findings(
            study="compression",
            title="Compression: bytes saved, accuracy lost",
            source=self.source,
            tables=[Table(f"{self.workers} workers on {self.network}, {self.task}", HEADINGS, rows)],
            charts=[chart(rows)],
            claims=list(claims(rows)),
            remarks=[
                f"Accuracy without codec: {accuracies(dense)} %. Changes are means over {self.seeds} seeds.",
                "dgc has momentum, the others do not; its learning rate is three tenths of theirs.",
                "Bytes are those of compressed messages; encoding and decoding take no virtual time.",
            ],
            settings={**asdict(self), "step_seconds": compute.mean},
        )

    def _settings(self, compute: Compute, seed: int) -> dict[str, Any]:
        virtual = {"transport": "sim", "compute": compute, "network": Network.parse(self.network)}
        return {"workers": self.workers, "epochs": self.epochs, "seed": seed, **virtual}


def accuracies(runs: list[Result]) -> str:
    """Mean and spread of the test accuracy, as text."""
    reached = [_accuracy(run) for run in runs]
    mean, spread = mean_and_spread(reached)
    return f"{mean:.2f} ± {spread:.2f}"


def _accuracy(run: Result) -> float:
    if run.test_accuracy is None:
        raise ValueError(f"task={run.task!r} has no test accuracy; take a task with classes, such as mnist")
    return run.test_accuracy


def row(published: PublishedCodec, attempts: Sequence[Result | None], dense: list[Result]) -> dict[str, Any]:
    """One row: the same seeds with and without a codec; no figures if one of them diverged."""
    line = {
        "codec": published.codec,
        "says": published.says,
        "allowed": published.allowed,
        "clock": "virtual",
    }
    runs = [run for run in attempts if run is not None]
    if len(runs) < len(attempts):
        return {**line, "ratio": None, "change": None, "speed_up": None}
    changes = [_accuracy(ours) - _accuracy(theirs) for ours, theirs in zip(runs, dense, strict=True)]
    plain = sum(node["dense_bytes"] for run in runs for node in run.nodes)
    coded = sum(node["coded_bytes"] for run in runs for node in run.nodes)
    return {
        **line,
        "ratio": plain / coded if coded else None,
        "change": mean_and_spread(changes),
        "speed_up": fmean(run.seconds for run in dense) / fmean(run.seconds for run in runs),
    }


def claims(rows: list[dict[str, Any]]) -> Iterable[Claim]:
    """Each codec with error feedback stays close to dense training, and the control does not."""
    for line in rows:
        if line["allowed"] is not None:
            behind = lag(line)
            yield Claim(
                f"{line['codec']} is {behind:.2f} points behind (at most {line['allowed']:g})",
                behind <= line["allowed"],
            )
    control = next((line for line in rows if line["codec"] == CONTROL), None)
    if control is not None:
        behind = lag(control)
        yield Claim(f"top_k without error feedback is worse: {behind:.2f} points behind", behind > 1)


def lag(line: Mapping[str, Any]) -> float:
    """How many points of accuracy a row is behind dense training; 100 if it diverged."""
    return -float(line["change"][0]) if line["change"] else 100.0


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Accuracy over bytes, one point for each codec."""
    lines = [
        ChartLine(line["codec"], [(line["ratio"], line["change"][0])])
        for line in rows
        if line["ratio"] is not None
    ]
    return Chart("Accuracy and bytes", "times fewer bytes", "points against dense", lines, log_x=True)
