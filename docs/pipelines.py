"""Draw docs/pipelines.svg: a step of four equal stages and eight microbatches with each schedule.

python docs/pipelines.py docs/pipelines.svg
"""

import sys
from pathlib import Path

from shoal.pipelines.schedules import SCHEDULES
from shoal.pipelines.virtual_step import StageCost, simulate_step
from shoal.report.pipeline_chart import BACKWARD_CLASS, FORWARD_CLASS, Pass, pipeline_chart
from shoal.report.style import CSS
from shoal.report.svg import Axis, fill_swatch
from shoal.report.units import percent_text, tick_text

DEVICES, MICROBATCHES, CHUNKS = 4, 8, 2
FORWARD, BACKWARD = 1.0, 2.0
WIDTH, HEIGHT, EACH, TOP = 760, 806, 256, 56
PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
  font-family="system-ui, sans-serif">
<style>{css} .word {{ fill: var(--ink); font-size: 15px; }}</style>
<rect width="{width}" height="{height}" fill="var(--page)"/>
<g transform="translate(24,16)">{legend}</g>
{charts}
</svg>
"""


def picture() -> str:
    """The three timelines on one axis, below each other."""
    longest, drawn = 0.0, []
    for schedule in SCHEDULES.values():
        chunks = CHUNKS if schedule.chunked else 1
        costs = [StageCost(FORWARD / chunks, BACKWARD / chunks)] * (DEVICES * chunks)
        timeline = simulate_step(schedule, costs, MICROBATCHES, devices=DEVICES)
        longest = max(longest, timeline.seconds)
        passes = [
            Pass(
                event.device,
                event.start,
                event.end,
                event.kind == "forward",
                str(event.microbatch),
                f"{event.kind} of microbatch {event.microbatch}, stage {event.stage}",
            )
            for event in timeline.events
        ]
        drawn.append((schedule.name, timeline, passes))
    charts = []
    for index, (name, timeline, passes) in enumerate(drawn):
        rows = [f"device {device}" for device in range(DEVICES)]
        chart = pipeline_chart(name, rows, passes, Axis("time", tick_text))
        width = (WIDTH - 48) * timeline.seconds / longest
        top = TOP + EACH * index
        told = f"{name}: {timeline.seconds:g} units of time, bubble {percent_text(timeline.bubble)}"
        charts.append(f'<text class="word" x="24" y="{top}">{told}</text>')
        charts.append(chart.replace('width="100%"', f'x="24" y="{top + 8}" width="{width:g}"', 1))
    names = [(FORWARD_CLASS, "forward, 1"), (BACKWARD_CLASS, "backward, 2"), ("idle", "bubble")]
    legend = "".join(
        f'<g transform="translate({130 * k},0)">{fill_swatch(kind)}'
        f'<text class="word" x="20" y="11">{name}</text></g>'
        for k, (kind, name) in enumerate(names)
    )
    return PICTURE.format(width=WIDTH, height=HEIGHT, css=CSS, legend=legend, charts="\n".join(charts))


Path(sys.argv[1]).write_text(picture())
