"""Two hosts with two workers each, started by `shoal run --hosts` over a real sshd, beside virtual time.

The hosts are network namespaces with processes of their own; the link of each has the given rate in both
directions. Nodes talk over gRPC with TLS, and ssh carries the control messages over the same links. Seconds
are those of the slowest node, from the start signal to the merged model; `start` is what the command took
before and after. Bytes are the kernel's count at the second host, in both directions.

Virtual time gets the same model, batches and strategy, a step that takes as long as the workers computed for
one on average in the measured run, and a network that knows how these hosts are connected (see `network`).

    python benchmarks/two_hosts.py [--rate 100mbit] [--strategies sync,bmuf,diloco+int8,asgd] [--steps 64]
        [--period 16] [--relay] [--json FILE]

Needs Linux, root, the programs `ip`, `tc`, `unshare`, and OpenSSH's client and server. SHOAL_DATA names the
folder that holds mnist/. The last line is JSON: the seconds of each strategy, measured and in virtual time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from machine_load import Load
from rich.console import Console
from rich.table import Table
from two_hosts_worker import BATCH, task

import shoal
from shoal.report.units import bytes_text, ratio_text
from shoal.sim import Compute, Link, Network
from shoal.strategies import STRATEGIES
from ssh_hosts import SshLab, obstacle

WORKER = Path(__file__).resolve().with_name("two_hosts_worker.py")
WORKERS = 4  # two on each host
RUN_SECONDS = 1800.0  # limit for one run


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or the hosts would stay
    if (why := obstacle()) is not None:
        sys.exit(f"two_hosts.py: {why}")
    rate = Network.parse(options.rate).bandwidth
    variables = {
        "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
        "SHOAL_DATA": str(Path(os.environ.get("SHOAL_DATA", ".")).resolve()),
        "OMP_NUM_THREADS": "1",
    }
    results: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="two-hosts-") as folder,
        SshLab(2, rate, Path(folder), variables) as lab,
    ):
        for word in options.strategies:
            results[word] = measure(lab, word, options)
            results[word]["virtual"] = simulate(word, options, results[word]["step"], rate)
            seconds, virtual = results[word]["seconds"], results[word]["virtual"]
            print(f"{word}: {seconds:.2f} s, virtual {virtual:.2f} s", file=sys.stderr, flush=True)
    show(results, options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    kinds = {"measured": "seconds", "virtual": "virtual"}
    print(
        json.dumps({f"{word} {kind}": r[key] for word, r in results.items() for kind, key in kinds.items()})
    )


def measure(lab: SshLab, word: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one strategy on the hosts."""
    strategy, _, codec = word.partition("+")
    json_file, log = lab.folder / "result.json", lab.folder / "launcher.log"
    words = ["run", "--hosts", "host0:2,host1:2", "--ssh", lab.command, "--remote-python", str(lab.python)]
    words += ["--strategy", strategy, *(["--codec", codec] if codec else []), "--json", str(json_file)]
    words += ["--relay"] if options.relay else []
    if "period" in STRATEGIES.options(strategy):
        words += ["--strategy.period", str(options.period)]
    words += ["--quiet", str(WORKER), "--samples", str(options.steps * BATCH * WORKERS)]
    load, began, before = Load(), time.monotonic(), lab.counted(1)
    process = lab.call([sys.executable, "-m", "shoal", *words], log)
    said, _ = process.communicate(timeout=RUN_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{word} ended with exit code {process.returncode}\n{said}\n{log.read_text()}")
    (record,) = json.loads(json_file.read_text())["runs"]
    accuracy = re.search(r"accuracy ([0-9.]+)", said)
    computing = [node["compute_seconds"] for node in record["nodes"] if node["role"] == "worker"]
    return {
        "step": fmean(computing) / options.steps,
        "seconds": record["seconds"],
        "start": time.monotonic() - began - record["seconds"],
        "accuracy": float(accuracy[1]) if accuracy else float("nan"),
        "bytes_sent": record["bytes_sent"],
        "on_the_wire": lab.counted(1) - before,
        "waiting": record["wait_fraction"],
        "others": load.of_others(sum(computing)),
    }


def network(strategy: str, rate: float, relayed: bool) -> Network:
    """How the four workers, 0 and 1 on the first host, 2 and 3 on the second, are connected over gRPC.

    With a server, on the first host, all messages are to and from it: its port has the link's rate. Without
    one the two workers of a host share its link: each has half of the rate. Inside a host shared memory takes
    no time, but inside the second all messages take the way over the first if those are relayed.
    """
    served = STRATEGIES.make(strategy).servers
    hosts = [(0, 1, WORKERS)] if served else [(0, 1)] if relayed else [(0, 1), (2, 3)]
    links = {(a, b): Link(0.0, inf) for near in hosts for a in near for b in near if a != b}
    return Network(0.0, rate if served else rate / 2, links=links)


def simulate(word: str, options: argparse.Namespace, step: float, rate: float) -> float:
    """The seconds that virtual time takes for the same."""
    strategy, _, codec = word.partition("+")
    settings = {"period": options.period} if "period" in STRATEGIES.options(strategy) else {}
    result = shoal.run(
        task(options.steps * BATCH * WORKERS),
        STRATEGIES.make(strategy, **settings),
        codec=codec or "none",
        workers=WORKERS,
        epochs=1,
        transport="sim",
        network=network(strategy, rate, options.relay),
        compute=Compute(step),
    )
    return result.seconds


def show(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(
        title=f"Two hosts, two workers each, links of {options.rate}, gRPC with TLS",
        caption=f"{options.steps} steps of {BATCH} samples a worker; period {options.period}. others: the "
        "share of the machine that other programs, sshd and TLS used, starting included; its load is "
        f"{os.getloadavg()[0]:.1f}.",
    )
    table.add_column("strategy")
    columns = ("measured, s", "virtual, s", "ratio", "start, s", "sent", "on the wire")
    for column in (*columns, "computing, ms a step", "waiting", "test acc. %", "others"):
        table.add_column(column, justify="right")
    for word, r in results.items():
        table.add_row(
            word,
            f"{r['seconds']:.2f}",
            f"{r['virtual']:.2f}",
            ratio_text(r["seconds"] / r["virtual"]),
            f"{r['start']:.1f}",
            bytes_text(r["bytes_sent"]),
            bytes_text(r["on_the_wire"]),
            f"{1e3 * r['step']:.1f}",
            f"{r['waiting']:.0%}",
            f"{r['accuracy']:.2f}",
            f"{r['others']:.0%}",
        )
    Console(width=max(Console().width, 132)).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of every link, in each direction")
    parser.add_argument(
        "--strategies", default="sync,bmuf,diloco+int8,asgd", type=lambda text: text.split(",")
    )
    parser.add_argument("--steps", type=int, default=64, help="of each worker")
    parser.add_argument("--period", type=int, default=16, help="steps between exchanges, where there are any")
    parser.add_argument("--relay", action="store_true", help="the keeper passes messages between workers on")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if min(options.steps, options.period) < 1:
        parser.error("--steps and --period must be positive")
    return options


if __name__ == "__main__":
    main()
