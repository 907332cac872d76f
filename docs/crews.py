"""Draw docs/crews.svg from a file that `benchmarks/crews.py --json` or `shoal compare --json` wrote.

python docs/crews.py crews.json docs/crews.svg
"""

import json
import re
import sys
from pathlib import Path

from shoal.report.charts import learning_curves, run_legend
from shoal.report.crews import legs_of
from shoal.report.style import CSS

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 460" width="640" height="460"
  font-family="system-ui, sans-serif">
<style>{css} .word {{ fill: var(--ink); font-size: 15px; }}</style>
<rect width="640" height="460" fill="var(--page)"/>
<text class="word" x="30" y="22">{title}</text>
{legend}
{chart}
</svg>
"""


def picture(runs: list[dict[str, object]], strategy: str = "sync") -> str:
    """Test accuracy over samples of one strategy, with all workers and with a crew that grows."""
    records = [run for run in runs if run["strategy"] == strategy]
    names = [
        f"{strategy}, a crew that grows: {legs_of(run)[0]['workers']} to {run['workers']} workers"
        if legs_of(run)
        else f"{strategy}, {run['workers']} workers"
        for run in records
    ]
    swatches = re.findall(r"<li>(<svg.*?</svg>).*?</li>", run_legend(records))
    legend = (
        f'<g transform="translate({30 + 190 * k},34)">{swatch}<text class="word" x="38" y="10">{name}</text>'
        "</g>"
        for k, (swatch, name) in enumerate(zip(swatches, names, strict=True))
    )
    figure = learning_curves(records, "test_accuracy").split("</figure>")[1]  # the second: over samples
    chart = figure[figure.index("<svg") : figure.rindex("</svg>") + len("</svg>")].replace(
        "<svg ", '<svg y="64" width="640" height="386" ', 1
    )
    title = f"Test accuracy on {records[0]['task']}, per cent; dashed: where the crew grew"
    return PICTURE.format(css=CSS, title=title, legend="\n".join(legend), chart=chart)


Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())["runs"]))
