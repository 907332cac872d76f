"""SearchResult: what a search found, as plain values, as a table, and as the record of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import nn

from shoal.search.searcher import FAILED, Searcher
from shoal.search.space import Space

MOST_ROWS = 10


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search and the best of them. `record()` gives the figures alone, for JSON.

    Scores are on the examples held out of the training set: accuracy in percent, or the loss with a minus.
    The test set was used once, for the best model.
    """

    method: str
    task: str
    metric: str
    best: dict[str, Any]  # trial, piece, score, epochs, values
    test_accuracy: float | None  # percent
    test_loss: float | None
    seconds: float
    epochs: int  # of all trials
    samples: int  # of all trials
    kills: int  # slots that were killed; their pieces were trained again
    trials: list[dict[str, Any]]
    pieces: list[dict[str, Any]]  # in the order in which they were suggested
    config: dict[str, Any]
    space: Space = field(repr=False, compare=False)  # config has it as text
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("model", "space")}

    def run_record(self) -> dict[str, Any]:
        """The search as one run, for `shoal runs` and `shoal report`."""
        point = {"seconds": self.seconds, "samples": self.samples}
        tested = {"test_accuracy": self.test_accuracy, "test_loss": self.test_loss}
        return {
            **tested,
            **point,
            "strategy": self.method,
            "task": self.task,
            "codec": "none",
            "transport": self.config["transport"],
            "workers": self.config["workers"],
            "samples_per_second": self.samples / self.seconds if self.seconds else 0.0,
            "bytes_sent": None,
            "wait_fraction": None,
            "config": self.config,
            "curve": [{**point, **tested}],
            "nodes": [],
            "search": self.record(),
        }


def tell_pieces(searcher: Searcher, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every piece with its score, when it was reported, and how often it was killed."""
    told = [
        {**piece.plain(), "score": None, "time": None, "seconds": None, "kills": 0, "message": ""}
        for piece in searcher.pieces
    ]
    for event in events:
        if event["event"] == "report":
            names = ("score", "time", "seconds", "message", "accuracy", "loss", "parameters")
            told[event["piece"]] |= {name: event.get(name) for name in names}
        elif event["event"] == "killed":
            told[event["piece"]]["kills"] += 1
    return told


def tell_trials(searcher: Searcher, pieces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every trial with its last values and its scores."""
    told = []
    for trial in searcher.trials:
        own = [piece for piece in pieces if piece["trial"] == trial.number]
        scores = [score for _, score in trial.history if score != FAILED]
        told.append(
            {
                "trial": trial.number,
                "parent": trial.parent,
                "values": trial.values,
                "score": None if trial.score == FAILED else trial.score,
                "best_score": max(scores, default=None),
                "epochs": sum(piece["end"] - piece["begin"] for piece in own if piece["time"] is not None),
                "seconds": sum(piece["seconds"] or 0.0 for piece in own),
                "exploits": sum(_is_exploit(piece, pieces) for piece in own),
                "kills": sum(piece["kills"] for piece in own),
                "message": next((piece["message"] for piece in reversed(own) if piece["message"]), ""),
            }
        )
    return told


def _is_exploit(piece: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it starts from the checkpoint of another trial."""
    return piece["origin"] is not None and pieces[piece["origin"]]["trial"] != piece["trial"]


def closing_search_table(result: SearchResult) -> Table:
    """The best trials with their values, best first."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    names = list(result.config["space"])
    for name in ("trial", "score", "epochs", *names):
        table.add_column(name, justify="right" if name in ("trial", "score", "epochs") else "left")
    for trial in best_first(result)[:MOST_ROWS]:
        is_best = trial["trial"] == result.best.get("trial")
        values = result.best["values"] if is_best else trial["values"]
        cells = [value_text(values[name]) for name in names]
        score = score_text(trial["best_score"], result.metric)
        row = [str(trial["trial"]), score, str(trial["epochs"]), *cells]
        table.add_row(*(Text(cell, "bold" if is_best else "") for cell in row))
    return table


def best_first(result: SearchResult) -> list[dict[str, Any]]:
    """The trials by their best score, the best of the search before its equals, failures last."""

    def place(trial: dict[str, Any]) -> tuple[float, bool, int]:
        score = FAILED if trial["best_score"] is None else trial["best_score"]
        return -score, trial["trial"] != result.best["trial"], trial["trial"]

    return sorted(result.trials, key=place)


def score_text(score: float | None, metric: str) -> str:
    """97.31 % or a loss of 0.213; scores of losses have a minus."""
    if score is None:
        return "failed"
    return f"{score:.2f} %" if metric == "accuracy" else f"{-score:.4g}"


def value_text(value: Any) -> str:
    """A value of a hyper-parameter, briefly."""
    if isinstance(value, bool) or not isinstance(value, (float, dict)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if value["kind"] == "layers":
        return " ".join(
            f"{layer['width']}{layer['activation'][0]}{'+' * layer['skip']}" for layer in value["layers"]
        )
    edges = sum(entry >= 0 for level in value["levels"] for motif in level for row in motif for entry in row)
    return f"{value['cells']} cells, {edges} edges"
