"""A loop whose workers kill themselves. The model has a weight for each sample: how often it came.

Prints the final weights of every worker that comes to the end, and what became of the loop.
"""

import argparse
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.launch.environment import Place
from shoal.vocabulary.strategy import Sends, Strategy

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=60)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--period", type=int, default=1)
parser.add_argument("--strategy-in-code", default="tally")
parser.add_argument("--kill", nargs="*", default=[], help="rank:step, or rank:eval, rank:end")
parser.add_argument("--again", action="store_true", help="kill those who come back, too")
parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--data", default="dealt", help="dealt, stream or own: no shard at all")
parser.add_argument("--gamma", type=float, default=1.0, help="by which the learning rate falls each epoch")
parser.add_argument("--per-batch", default="", help="step the scheduler at every batch; and when it is back")
parser.add_argument("--stop-after", type=int, default=-1, help="steps, after which all processes vanish")
parser.add_argument("--uneven", type=int, default=-1, help="the rank that skips its first batch")
parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
parser.add_argument("--most", type=int, default=-1, help="steps of a pass, which the loop then leaves")
parser.add_argument("--frozen", action="store_true", help="a layer that is not trained, and not alike")
parser.add_argument("--hurry", type=Path, help="a file; when it is there, steps take no time any more")
parser.add_argument(
    "--returns", type=Path, help="a folder: the others wait for those who note there that they die"
)
parser.add_argument("--tell", action="store_true", help="print what was read for each step that was done")
parser.add_argument("--odd", default="", help="what is different at one that joined")
args = parser.parse_args()
me = Place.find()
odd = args.odd if me.joins else ""


@dataclass(frozen=True)
class Tally(Strategy):
    """Adds up what all workers bring, where model averaging would average it."""

    sends = Sends.DIFFERENCES
    period: int = 1

    async def worker(self, w):
        start = w.keep("start", w.x)
        async for _ in w.blocks(self.period):
            before, own = w.engine.merged, max(1.0, w.unmerged)
            average = await w.mean((w.x - start) / own)
            start.add_(average, alpha=w.engine.merged - before)
            w.x.copy_(start)

    def solution(self, node):
        return node.keep("start", node.x)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(args.samples))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(args.samples + (odd == "model"), dtype=torch.float64))
        if args.frozen:
            self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("running_mean", torch.zeros(1))
        self.register_buffer("marker", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids):
        if self.training:
            self.running_mean += len(ids)
        return -self.counts[ids].sum()


def perish(moment: str) -> None:
    if f"{me.rank}:{moment}" in args.kill and (args.again or not me.incarnation):
        note("died")
        os.kill(os.getpid(), signal.SIGKILL)


def note(what: str) -> None:
    if args.returns is not None:
        (args.returns / f"{what}-{me.rank}").touch()


def noted(what: str) -> int:
    return len(list(args.returns.glob(f"{what}-*"))) if args.returns is not None else 0


def take_time() -> None:
    """The time of a step. However long a process takes to start, one that was killed takes part again."""
    while noted("died") > noted("starts"):
        time.sleep(0.02)
    if noted("died") > noted("trains"):
        time.sleep(0.3)
    elif args.hurry is None or not args.hurry.exists():
        time.sleep(args.pause)


size = args.samples - (odd == "data")
numbers = Numbers() if args.data == "stream" else TensorDataset(torch.arange(size))
loader = DataLoader(numbers, args.batch, shuffle=args.data != "stream", num_workers=args.loader_workers)
model = Counts()
model.marker.fill_(me.incarnation)
momentum = 0.5 if odd == "optimizer" else 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
strategy = Tally(args.period) if args.strategy_in_code == "tally" else args.strategy_in_code
if me.incarnation:
    note("starts")
training = shoal.attach(model, optimizer, strategy)
if odd == "rate":
    optimizer.param_groups[0]["lr"] = 0.5
if me.incarnation:
    print(f"goes on from {training.engine.t}, marked {int(model.marker)}")
step, read, told = training.engine.t - training.engine.rounds.shift, 0, []
if args.per_batch == "right":
    for _ in range(training.resumed_from or 0):
        schedule.step()
batches = [(torch.arange(3),)] * 40 if args.data == "own" else shoal.shard(loader)
for _ in range(args.epochs):
    for batch in batches:
        ids = batch if args.data == "stream" else batch[0]
        if me.incarnation:
            note("trains")
        take_time()
        if args.uneven == me.rank and step == 0:
            args.uneven = -1
            continue
        read += 1
        if read % args.accumulate == 1 or args.accumulate == 1:
            optimizer.zero_grad()
        model(ids).backward()
        told += ids.tolist()
        if read % args.accumulate:
            continue
        perish(str(step))
        optimizer.step()
        step += 1
        if args.tell:
            print(f"read {told}")
            told.clear()
        if step == args.stop_after:
            os._exit(9)
        if args.per_batch:
            schedule.step()
        if args.most > 0 and step % args.most == 0:
            break
    model.eval()
    perish("eval")
    with torch.no_grad(), training.common_model():
        model(torch.arange(args.samples))
    model.train()
    if not args.per_batch:
        schedule.step()
perish("end")
training.finish()
if training.is_first:
    print("is first")
if args.frozen:
    print(f"frozen {model.frozen.tolist()}")
print(f"buffers {float(model.running_mean):g} {int(model.marker)}")
print("weights " + model.counts.detach().float().numpy().tobytes().hex())
