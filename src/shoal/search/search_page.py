"""The HTML page of a search: one file that opens offline, with lineage, progress and all trials."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal.report.files import write_whole
from shoal.report.html import document
from shoal.report.svg import Axis, Point, Series, line_chart
from shoal.report.units import count_text, seconds_text, tick_text
from shoal.search.pictures import descent, lineage, parallel_coordinates
from shoal.search.search_result import SearchResult, best_first, score_text, value_text

MOST_TRIALS = 100


def write_search_page(result: SearchResult, path: str | os.PathLike[str]) -> Path:
    """Write the page of a search to `path` and return the path. Creates missing folders."""
    return write_whole(path, search_page(result))


def search_page(result: SearchResult) -> str:
    """The whole document as text."""
    coordinates = parallel_coordinates(result.pieces, result.space, result.metric)
    sections = [
        f'<p class="lead">{escape(headline(result))}</p>',
        _best(result),
        _section("Best so far", _progress(result)),
        _family(result),
        _section("Parallel coordinates", coordinates, "Every scored model; the best tenth in colour."),
        _table(result),
    ]
    facts = f"{result.config['method']} · {len(result.trials)} trials · {count_text(result.samples)} samples"
    return document(f"Search over {result.task}", facts, "\n".join(filter(None, sections)))


def headline(result: SearchResult) -> str:
    """The outcome in a sentence or two."""
    best = result.best
    score = score_text(best["score"], result.metric)
    what = "accuracy" if result.metric == "accuracy" else "loss"
    trials, epochs = count(len(result.trials), "trial"), count(best["epochs"], "epoch")
    told = (
        f"The best of {trials} is trial {best['trial']} after {epochs}: {what} {score} on examples held out"
    )
    if result.test_accuracy is not None:
        told += f", {result.test_accuracy:.2f} % on the test set, which was used once"
    elif result.test_loss is not None:
        told += f", loss {result.test_loss:.4g} on the test set, which was used once"
    took = f"All trials together took {result.epochs} epochs in {seconds_text(result.seconds)} s."
    killed = f" Killed and continued: {result.kills} times." if result.kills else ""
    return f"{told}. {took}{killed}"


def count(number: int, noun: str) -> str:
    """1 epoch, 2 epochs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _section(title: str, body: str, remark: str = "") -> str:
    told = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    return f"<h2>{escape(title)}</h2>{told}{body}" if body else ""


def _best(result: SearchResult) -> str:
    items = "".join(
        f"<li><b>{escape(name)}</b> <span>{escape(value_text(value))}</span></li>"
        for name, value in result.best["values"].items()
    )
    return f'<ul class="verdicts">{items}</ul>'


def _progress(result: SearchResult) -> str:
    """The best score so far, over time, samples and trials."""
    done = sorted(
        (piece for piece in result.pieces if piece["score"] is not None), key=lambda piece: piece["time"]
    )
    each = result.samples / max(1, result.epochs)
    epochs, first, second, third = 0, [], [], []
    best = None
    for number, piece in enumerate(done, 1):
        epochs += piece["end"] - piece["begin"]
        best = piece["score"] if best is None else max(best, piece["score"])
        y = best if result.metric == "accuracy" else -best
        note = f"{score_text(best, result.metric)} after {seconds_text(piece['time'])} s, {number} models"
        first.append(Point(piece["time"], y, note))
        second.append(Point(epochs * each, y, note))
        third.append(Point(number, y, note))
    charts = [
        _chart("over time", "seconds", first, tick_text, result.metric),
        _chart("over samples", "samples of all trials", second, count_text, result.metric),
        _chart("over trials", "models scored", third, tick_text, result.metric),
    ]
    return f'<div class="pair">{"".join(charts)}</div>'


def _chart(title: str, label: str, points: Sequence[Point], text: Callable[[float], str], metric: str) -> str:
    what = "Accuracy on examples held out, %" if metric == "accuracy" else "Loss on examples held out"
    low = min((point.y for point in points), default=0.0)
    log = metric != "accuracy" and low > 0
    drawn = line_chart(
        f"{what}, best {title}",
        [Series("best so far", 0, points)],
        Axis(label, text),
        Axis(what, tick_text, log),
        low if metric == "accuracy" else None,
    )
    caption = f"{what}: best {title}"
    return f'<figure class="live"><figcaption>{escape(caption)}</figcaption>{drawn}</figure>'


def _family(result: SearchResult) -> str:
    """The lineage of a population, or the descent of evolved models; nothing for the others."""
    if any(trial["exploits"] for trial in result.trials) or result.method == "pbt":
        drawn = lineage(result.pieces, result.best["piece"], result.metric)
        remark = (
            "A row for each member; a line between two is a copy of weights. In colour: the way of the best."
        )
        return _section("Lineage", drawn, remark)
    if any(trial["parent"] is not None for trial in result.trials):
        drawn = descent(result.trials, result.best["trial"], result.metric)
        remark = "Each model at its score, with a line to its parent. In colour: the ancestors of the best."
        remark += "" if result.metric == "accuracy" else " The worst tenth lies at the bottom."
        return _section("Lineage", drawn, remark)
    return ""


def _table(result: SearchResult) -> str:
    names = list(result.config["space"])
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("score", "epochs", "exploits", *names))
    order = best_first(result)
    rows = "".join(_row(trial, names, result) for trial in order[:MOST_TRIALS])
    more = f"The best {MOST_TRIALS} of {len(order)}." if len(order) > MOST_TRIALS else ""
    table = (
        f'<table class="summary"><thead><tr><th scope="col">trial</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    region = f'<div class="scroll" role="region" aria-label="All trials" tabindex="0">{table}</div>'
    return _section("Trials", region, more)


def _row(trial: Mapping[str, Any], names: Sequence[str], result: SearchResult) -> str:
    is_best = trial["trial"] == result.best["trial"]
    values = result.best["values"] if is_best else trial["values"]
    score = score_text(trial["best_score"], result.metric)
    cells = [
        score,
        str(trial["epochs"]),
        str(trial["exploits"]),
        *(value_text(values[name]) for name in names),
    ]
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr{" class=best" if is_best else ""}><th scope="row">{trial["trial"]}</th>{row}</tr>'
