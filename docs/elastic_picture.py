"""Draw docs/elastic.svg from what `benchmarks/storm.py --events` wrote of one strategy.

python docs/elastic_picture.py storm.json docs/elastic.svg
"""

import json
import sys
from html import escape
from pathlib import Path

from shoal.report.style import CSS
from shoal.report.svg import nice_ticks

LEFT, RIGHT, TOP, ROW, BAR = 100, 620, 62, 24, 14

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" width="640" height="{height}"
  font-family="system-ui, sans-serif">
<style>{css} text {{ fill: var(--ink); font-size: 13px; }} .tick {{ fill: var(--soft); font-size: 12px; }}
.trains {{ fill: var(--compute); }} .away {{ fill: var(--wait); }}
.killed {{ stroke: var(--fault); stroke-width: 2.5; }} .grid {{ stroke: var(--grid); }}</style>
<rect width="640" height="{height}" fill="var(--page)"/>
<text x="20" y="22" style="font-size: 15px">{title}</text>
<g transform="translate(20,34)"><rect class="trains" width="14" height="12"/><text x="20" y="11">trains</text>
<rect class="away" x="90" width="14" height="12"/>
<text x="110" y="11">killed, started again, gets the model</text>
<line class="killed" x1="370" y1="-1" x2="370" y2="13"/><text x="380" y="11">SIGKILL</text></g>
{body}
</svg>
"""


def picture(word: str, events: list[tuple[float, str, str]]) -> str:
    """A row for each worker, and one for the keeper if it was killed."""
    end = events[-1][0]
    names = sorted(
        {who for _, who, _ in events if who.startswith("worker")}, key=lambda who: int(who.split()[1])
    )
    names += ["the keeper"] * any(who == "the keeper" for _, who, _ in events)
    bottom = TOP + ROW * len(names)
    at = (RIGHT - LEFT) / end
    body = []
    for tick in nice_ticks(0.0, end):
        x = LEFT + at * tick
        body.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom}"/>')
        body.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g} s</text>'
        )
    for row, name in enumerate(names):
        y = TOP + ROW * row
        body.append(f'<text x="20" y="{y + 12}">{escape(name)}</text>')
        own = [(seconds, what) for seconds, who, what in events if who == name]
        if name == "the keeper":
            own = [(0.0, "trains"), *((s, w) for s, w in own)]
        body += bars(own, end, y, at, is_keeper=name == "the keeper")
    title = f"{len([n for n in names if n != 'the keeper'])} workers, {word}: who trained when"
    return PICTURE.format(css=CSS, title=escape(title), body="\n".join(body), height=bottom + 28)


def bars(own: list[tuple[float, str]], end: float, y: int, at: float, is_keeper: bool) -> list[str]:
    """The times in which one was there, those in which it was not, and the kills between them."""
    drawn = []
    for k, (seconds, what) in enumerate(own):
        until = own[k + 1][0] if k + 1 < len(own) else end
        kind = "trains" if what == "trains" or is_keeper else "away"
        x, width = LEFT + at * seconds, at * (until - seconds)
        drawn.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>')
        if what == "killed":
            drawn.append(f'<line class="killed" x1="{x:.1f}" y1="{y - 3}" x2="{x:.1f}" y2="{y + BAR + 3}"/>')
    return drawn


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    word = next(iter(runs))
    Path(sys.argv[2]).write_text(picture(word, runs[word]))
