"""The HTML page of a deep belief network: its filters, its samples, and the curves of its stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torch import Tensor

from shoal.report.charts import figure
from shoal.report.files import write_whole
from shoal.report.html import document
from shoal.report.pixels import montage, signed
from shoal.report.reading import Record
from shoal.report.svg import Axis, Point, Series, legend, line_chart, line_swatch
from shoal.report.units import count_text, decimal_text, finite, seconds_text, tick_text

MOST_FILTERS = 200
READING = {
    "reconstruction error": "nats per row; falls. Not the objective: it may fall while the model gets worse.",
    "pseudo-likelihood": "nats per row; rises towards 0. The better guide for persistent chains.",
    "free-energy gap": "nats per row, test minus training rows. A gap that grows is over-fitting.",
}


@dataclass(frozen=True)
class Dreams:
    """Samples of Gibbs chains: for each number of steps a row of pictures, one per chain."""

    steps: Sequence[int]  # 0: the first picture of each chain
    pictures: Sequence[Tensor]  # for each of them: chains x height x width, from 0 to 1


def write_gallery(
    path: str | os.PathLike[str],
    title: str,
    stages: Mapping[str, Record],
    filters: Tensor | None = None,
    dreams: Dreams | None = None,
    facts: str = "",
) -> Path:
    """Write the page to `path` and return the path. `stages` are records of runs by name, in order.

    `filters` are the weights of the first layer as pictures: units x height x width. Omit them and the dreams
    if the inputs are not pictures. Raises OSError with the path if the file cannot be written.
    """
    sections = [_stages(stages), _curves(stages), _filters(filters), _dreams(dreams)]
    return write_whole(path, document(title, facts, "\n".join(section for section in sections if section)))


def _stages(stages: Mapping[str, Record]) -> str:
    names = _metrics(stages)
    heads = ["parameters", "workers", "samples", "seconds", *names, "test accuracy, %"]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("stage", *heads))
    rows = []
    for style, (name, record) in enumerate(stages.items()):
        metrics = record.get("metrics") or {}
        cells = [count_text(record.get(key)) for key in ("parameters", "workers", "samples")]
        cells += [seconds_text(record.get("seconds"))]
        cells += [decimal_text(metrics.get(metric), 2) for metric in names]
        cells += [decimal_text(record.get("test_accuracy"), 2)]
        swatch = line_swatch(style)
        filled = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{swatch}{escape(name)}</th>{filled}</tr>')
    return (
        '<h2>Stages</h2><div class="scroll" role="region" aria-label="Stages" tabindex="0">'
        f'<table class="summary"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _metrics(stages: Mapping[str, Record]) -> list[str]:
    """The metrics of all stages, each once."""
    return list(dict.fromkeys(name for record in stages.values() for name in record.get("metrics") or ()))


def _curves(stages: Mapping[str, Record]) -> str:
    pictures = []
    for metric in _metrics(stages):
        lines = [
            Series(name, style, _points(name, record, metric))
            for style, (name, record) in enumerate(stages.items())
            if metric in (record.get("metrics") or {})
        ]
        chart = line_chart(metric, lines, Axis("samples", _millions), Axis(metric, tick_text))
        pictures.append(_explained(figure(metric.capitalize(), chart), READING.get(metric, "")))
    pictures += _errors(stages)
    key = legend([(line_swatch(style), name) for style, name in enumerate(stages)])
    return f'<h2>Curves</h2>{key}<div class="pair">{"".join(pictures)}</div>' if pictures else ""


def _explained(picture: str, remark: str) -> str:
    return f'<div>{picture}<p class="remark">{escape(remark)}</p></div>'


def _points(name: str, record: Record, metric: str) -> list[Point]:
    points = []
    for entry in record.get("curve") or ():
        x, y = finite(entry.get("samples")), finite((entry.get("metrics") or {}).get(metric))
        if x and y is not None:  # the value before the first step would stretch the axis
            points.append(Point(x, y, f"{name}: {y:.4g} after {count_text(x)} samples"))
    return points


def _errors(stages: Mapping[str, Record]) -> list[str]:
    """The test error of the stages that classify, in one chart; nothing if no stage does."""
    lines = []
    for style, (name, record) in enumerate(stages.items()):
        points = []
        for entry in record.get("curve") or ():
            x, right = finite(entry.get("samples")), finite(entry.get("test_accuracy"))
            if x and right is not None:  # chance level before the first step
                points.append(Point(x, 100 - right, f"{100 - right:.2f} % after {count_text(x)} samples"))
        lines += [Series(name, style, points)] if points else []
    if not lines:
        return []
    chart = line_chart("Test error, %", lines, Axis("samples", _millions), Axis("test error, %", tick_text))
    return [_explained(figure("Test error, %", chart), "of the whole network, during fine-tuning.")]


def _filters(filters: Tensor | None) -> str:
    if filters is None:
        return ""
    shown = filters[:MOST_FILTERS]
    picture = montage(signed(shown), f"Weights of {len(shown)} hidden units as pictures")
    remark = (
        f"The weights of {len(shown)} of {len(filters)} units of the first layer, each scaled by its "
        "largest: white is positive, black negative, grey zero. Look for strokes and spots; a unit without "
        "structure has learnt nothing."
    )
    return f'<h2>Filters</h2><p class="remark">{remark}</p><div class="scroll">{picture}</div>'


def _dreams(dreams: Dreams | None) -> str:
    if dreams is None:
        return ""
    rows = []
    for steps, pictures in zip(dreams.steps, dreams.pictures, strict=True):
        told = "the examples they start from" if steps == 0 else f"after {steps:,} step{'s' * (steps > 1)}"
        image = montage(pictures, f"{len(pictures)} chains, {told}")
        rows.append(f'<figure class="dream"><figcaption>{told}</figcaption>{image}</figure>')
    remark = (
        "Each column is a Gibbs chain in the top layers of the pretrained network. It starts from an example "
        "of the test set and then runs freely."
    )
    return f'<h2>Fantasies</h2><p class="remark">{remark}</p><div class="scroll">{"".join(rows)}</div>'


def _millions(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e5 else tick_text(value)
