"""Draw docs/slow_link.svg, the picture in the README, from a file that `shoal compare --json` wrote.

python docs/slow_link.py slow_link.json docs/slow_link.svg
"""

import json
import sys
from pathlib import Path

from shoal.report.charts import learning_curves, run_legend
from shoal.report.style import CSS

WIDTH, HEIGHT, PLOT = 640, 440, 386  # the page, and the height of the chart below title and legend
records = json.loads(Path(sys.argv[1]).read_text())["runs"]

curves = learning_curves(records, "test_accuracy")
chart = curves[curves.index("<svg") : curves.index("</figure>")]  # the first of two: over time
swatches = run_legend(records).split("<li>")[1:]
places = ((30 + 120 * k, swatch) for k, swatch in enumerate(swatches))
legend = "".join(
    f'<g transform="translate({x},34)">{swatch[: swatch.index("</svg>") + 6]}'
    f'<text class="word" x="38" y="10">{swatch[swatch.index("</svg>") + 6 : swatch.index("</li>")]}</text></g>'
    for x, swatch in places
)
Path(sys.argv[2]).write_text(
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
    f'font-family="system-ui, sans-serif">\n<style>{CSS} .word, .title {{ fill: var(--ink); font-size: 15px; }}'
    f'</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--page)"/>\n'
    f'<text class="title" x="30" y="22">Test accuracy on MNIST, per cent, over time</text>\n{legend}\n'
    + chart.replace("<svg ", f'<svg x="0" y="54" width="{WIDTH}" height="{PLOT}" ', 1)
    + "\n</svg>\n"
)
