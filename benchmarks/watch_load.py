"""What the live page costs the launcher: processor time of its server, in per cent of one core.

Feeds a page with the progress events of 64 workers at 2 updates a second each, and at the 5 that a node sends
at most, while a browser follows: a process of its own that reads everything, and is not counted.
The time is processor time, so load from other programs hardly matters.

    python benchmarks/watch_load.py [--workers 64] [--seconds 6]

The last line is JSON: the share of a core for each case, and the bytes a second to one browser.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from shoal.watch import LivePage

TARGET = 0.01
READER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "events") as stream:
    print("reading", flush=True)
    print(sum(len(line) for line in stream))
"""


def events(workers: int, number: int) -> list[dict[str, Any]]:
    """The reports of all workers at one moment."""
    return [
        {
            "rank": rank,
            "role": "worker",
            "seconds": 0.5 * number,
            "step": 40 * number + rank,
            "steps": 100_000,
            "loss": 2.3 / (1 + number) + 0.001 * rank,
            "samples": 2560 * number,
            "samples_per_second": 5000.0 + rank,
            "wait_fraction": 0.1 + 0.001 * rank,
            "compute_fraction": 0.8,
            "bytes_sent": 400_000 * number,
            "saved_seconds": None,
            "staleness": None,
            "state": "waiting" if rank % 9 == number % 9 else "computing",
            "awaits": "'mean' from worker 0" if rank % 9 == number % 9 else "",
        }
        for rank in range(workers)
    ]


def measure(workers: int, updates: float, seconds: float, browser: bool) -> tuple[float, float]:
    """The share of a core that the page takes, and the bytes a second that the browser got."""
    moments = [events(workers, number) for number in range(1, int(seconds * updates) + 1)]
    page = LivePage()
    reader = None
    if browser:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, page.address], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
    page.start("sync on train.py", workers)
    began, busy = time.monotonic(), time.process_time()
    for number, moment in enumerate(moments, 1):
        for event in moment:
            page.update(event)
        time.sleep(max(0.0, began + number / updates - time.monotonic()))
    wall, busy = time.monotonic() - began, time.process_time() - busy
    page.close()
    received = 0
    if reader is not None:
        received = int(reader.communicate(timeout=60)[0])
    return busy / wall, received / wall


def main() -> None:
    """Measure each case, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    figures: dict[str, Any] = {"workers": args.workers}
    for name, updates, browser in (
        ("no browser, 2 updates/s", 2.0, False),
        ("one browser, 2 updates/s", 2.0, True),
        ("one browser, 5 updates/s", 5.0, True),
    ):
        share, rate = measure(args.workers, updates, args.seconds, browser)
        sent = f", {rate / 1e3:.0f} kB/s to the browser" if browser else ""
        print(f"{name}: {100 * share:.2f} % of a core{sent}")
        figures[name] = {"share_of_core": round(share, 5), "bytes_per_second": round(rate)}
    met = figures["one browser, 2 updates/s"]["share_of_core"] < TARGET
    print(f"target of {100 * TARGET:.0f} % at 2 updates/s: {'met' if met else 'missed'}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
