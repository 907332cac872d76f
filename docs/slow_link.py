"""Draw docs/slow_link.svg, the picture in the README, from a file that `shoal compare --json` wrote.

python docs/slow_link.py slow_link.json docs/slow_link.svg
"""

import json
import re
import sys
from pathlib import Path

from shoal.report.charts import learning_curves, run_legend
from shoal.report.style import CSS

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 440" width="640" height="440"
  font-family="system-ui, sans-serif">
<style>{css} .word {{ fill: var(--ink); font-size: 15px; }}</style>
<rect width="640" height="440" fill="var(--page)"/>
<text class="word" x="30" y="22">Test accuracy on MNIST over time, per cent; the axis begins at 90</text>
{legend}
{chart}
</svg>
"""


def picture(records: list[dict[str, object]]) -> str:
    """The chart of test accuracy over time in the report, with title and legend, as a file of its own."""
    svg = r"<svg.*?</svg>"
    swatches = re.findall(rf"<li>({svg})(.*?)</li>", run_legend(records))
    legend = (
        f'<g transform="translate({30 + 120 * k},34)">{swatch}<text class="word" x="38" y="10">{name}</text>'
        "</g>"
        for k, (swatch, name) in enumerate(swatches)
    )
    figure = learning_curves(records, "test_accuracy").split("</figure>")[0]  # over time; then over samples
    chart = figure[figure.index("<svg") : figure.rindex("</svg>") + len("</svg>")].replace(
        "<svg ", '<svg y="54" width="640" height="386" ', 1
    )
    return PICTURE.format(css=CSS, legend="\n".join(legend), chart=chart)


Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())["runs"]))
