"""Draw docs/groups.svg: two workers of two processes, what travels inside a worker and what between workers.

python docs/groups_picture.py docs/groups.svg
"""

import sys
from pathlib import Path

from shoal.report.style import CSS

WIDTH, HEIGHT = 640, 330
COLUMNS, ROWS = (70, 370), (62, 196)  # of the processes, by worker and position
BOX = (200, 70)

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
  font-family="system-ui, sans-serif">
<style>{css} text {{ fill: var(--ink); font-size: 14px; text-anchor: middle; }}
  .worker {{ fill: var(--tint); stroke: var(--rule); }} .process {{ fill: var(--page); stroke: var(--soft); }}
  .inside {{ stroke: var(--s1); stroke-width: 5; }} .between {{ stroke: var(--s0); stroke-width: 2; }}
  .inside-word {{ fill: var(--s1); }}
  .between-word {{ fill: var(--s0); }} .soft {{ fill: var(--soft); }}</style>
<rect width="{width}" height="{height}" fill="var(--page)"/>
{parts}
</svg>
"""


def word(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{text}</text>'


def box(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="{kind}"/>'


def line(x1: int, y1: int, x2: int, y2: int, kind: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>'


def worker(rank: int) -> list[str]:
    """One group: its frame, its processes and the line between them."""
    left, middle = COLUMNS[rank], COLUMNS[rank] + BOX[0] // 2
    parts = [
        box(left - 30, 12, BOX[0] + 60, 276, "worker"),
        word(middle, 38, f"worker {rank}, one batch"),
        line(middle - 86, ROWS[0] + BOX[1], middle - 86, ROWS[1], "inside"),
        word(middle, (ROWS[0] + BOX[1] + ROWS[1]) // 2 + 5, "FSDP, tensors, stages", "inside-word"),
    ]
    for position, top in enumerate(ROWS):
        parts += [
            box(left, top, *BOX, "process"),
            word(middle, top + 30, f"process {position}"),
            word(middle, top + 52, f"shard {position} of the model", "soft"),
        ]
    return parts


def picture() -> str:
    """The whole picture."""
    parts = [part for rank in range(2) for part in worker(rank)]
    right, left = COLUMNS[0] + BOX[0], COLUMNS[1]
    parts += [line(right, top + BOX[1] // 2, left, top + BOX[1] // 2, "between") for top in ROWS]
    parts.append(word(WIDTH // 2, 312, "between processes of one position: any strategy", "between-word"))
    return PICTURE.format(width=WIDTH, height=HEIGHT, css=CSS, parts="\n".join(parts))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
