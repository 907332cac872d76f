"""Draw docs/lbfgs.svg, the picture of docs/lbfgs.md, from a file that `benchmarks/lbfgs.py --json` wrote.

python docs/lbfgs.py lbfgs.json docs/lbfgs.svg
"""

import json
import sys
from pathlib import Path

from shoal.report.style import CSS
from shoal.report.svg import Axis, Point, Series, line_chart, line_swatch
from shoal.report.units import tick_text

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 460" width="640" height="460"
  font-family="system-ui, sans-serif">
<style>{css} .word {{ fill: var(--ink); font-size: 15px; }}</style>
<rect width="640" height="460" fill="var(--page)"/>
<text class="word" x="30" y="22">MNIST, logistic regression: training loss above its minimum, relative</text>
{legend}
{chart}
</svg>
"""


def picture(curves: dict[str, list[tuple[float, float]]]) -> str:
    """The loss above the minimum over virtual seconds, on a logarithmic axis."""
    series = [
        Series(name, style, [Point(x, y, f"{name}: {y:.2g} after {x:.2f} s") for x, y in points if y > 0])
        for style, (name, points) in enumerate(curves.items())
    ]
    legend = "\n".join(
        f'<g transform="translate({30 + 155 * k},34)">{line_swatch(line.style)}'
        f'<text class="word" x="38" y="10">{line.name}</text></g>'
        for k, line in enumerate(series)
    )
    loss = Axis("loss / minimum - 1", tick_text, log=True)
    drawn = line_chart("Training loss above its minimum", series, Axis("virtual seconds", tick_text), loss)
    chart = drawn[: drawn.rindex("</svg>") + len("</svg>")].replace(
        "<svg ", '<svg y="60" width="640" height="400" ', 1
    )
    return PICTURE.format(css=CSS, legend=legend, chart=chart)


Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())["curves"]) + "\n")
