"""Storms: a seed is a run on a network and on machines that keep no promise, and what must hold at its end.

    python tests/sim/storm.py 17                          one seed, told in full
    python tests/sim/storm.py 0:500                       what goes wrong in any of these
    python tests/sim/storm.py 0:500 --mutant "no retry"   how many of these catch that mutant
    python tests/sim/storm.py 0:500 --mutant all          the same for every mutant: a table

`--memory` takes servers that keep snapshots only.

The n-th gradient that anybody takes adds 1 to element n of every shard, and to no other. So the model itself
tells how often each gradient is in it, and which batch that was.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.identity import SERVER
from shoal.core.replica import Parameters, Replica
from shoal.core.transport import Message
from shoal.engine.engine import Engine, Instrument
from shoal.engine.mailbox import Question
from shoal.engine.protocol import Ack, Reply
from shoal.sim import Compute, Disk, Faults, Network, Simulation, Weather
from shoal.sim.disk import POINTS
from shoal.strategies import ASGD, SSP, Downpour, SoftSync, SyncServer
from shoal.testing.problems import Problem
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central, Strategy

SLOTS = 64
"""Gradients that one run may take, those included that die with their worker."""

PATIENCE_SECONDS = 50.0
"""Virtual time after the last fault in which everybody finishes."""


# -- what a seed decides -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flurry(Central):
    """Asynchronous SGD with up to `most` pushes of one worker under way."""

    most: int = 3

    async def worker(self, w: Node) -> None:
        sent = []
        async for t in w.steps():
            await w.pull(SERVER, out=w.x)
            sent.append(await w.begin(w.push(SERVER, await w.grad())))
            if (t + 1) % self.most == 0 or w.is_last(t):
                while sent:
                    await sent.pop(0)

    async def server(self, s: Node) -> None:
        await ASGD().server(s)


STRATEGIES: list[tuple[int, list[Strategy]]] = [
    (50, [ASGD()]),
    (12, [Downpour(n_push=2, warmup=0), Downpour(overlap=True, warmup=0)]),
    (10, [SSP(bound=0), SSP(bound=1), SSP(bound=3)]),
    (10, [SoftSync(wait=True, staleness_aware=False), SoftSync(collect=2, staleness_aware=False)]),
    (8, [SyncServer()]),
    (10, [Flurry()]),
]
"""Per cent of the seeds, and what is run there."""

ADD_UP = (ASGD, Downpour, SSP, Flurry)
"""Where every gradient is in the model with weight 1. Elsewhere it is part of a mean."""

AT_ONCE = (ASGD, Downpour, Flurry)
"""Where every push makes a version of its own."""


@dataclass(frozen=True)
class Storm:
    """One schedule. All that happens in it follows from its values."""

    seed: int
    strategy: Strategy
    workers: int
    steps: int
    shards: int
    retry: float
    compute: Compute
    network: Network
    weather: Weather
    faults: Faults
    snapshot_every: int
    crashes: dict[int, list[tuple[str, int]]]  # server -> at which points of its log it dies
    keeps_every_update: bool = True

    @classmethod
    def draw(cls, seed: int, keeps_every_update: bool = True) -> Storm:
        dice = random.Random(f"storm {seed}")
        weights, kinds = zip(*STRATEGIES, strict=True)
        strategy = dice.choice(dice.choices(kinds, weights)[0])
        workers, steps, shards = dice.randint(2, 4), dice.randint(4, 8), dice.choice([1, 1, 1, 2])
        servers = range(workers, workers + shards)
        # a network that reorders pushes of one worker may count the earlier ones as done when it dies
        mortal = servers if isinstance(strategy, Flurry) else range(workers + shards)
        return cls(
            seed,
            strategy,
            workers,
            steps,
            shards,
            dice.choice([0.2, 0.5, 1.0]),
            Compute(mean=dice.choice([0.05, 0.2, 0.5]), jitter=0.5, slow={0: dice.choice([1.0, 4.0])}),
            Network(latency=dice.choice([0.0, 0.01, 0.1])),
            Weather(
                loss=dice.choice([0.0, 0.1, 0.2, 0.3]),
                double=dice.choice([0.0, 0.1, 0.3]),
                delay=dice.choice([0.0, 0.1, 0.5, 2.0, 5.0]),
                until=dice.uniform(1.0, 10.0),
            ),
            cls._draw_trouble(seed, workers, servers, cls._draw_faults(dice, mortal)),
            dice.randint(1, 8) * (1 if keeps_every_update else 4),
            {rank: cls._draw_crashes(dice) for rank in servers},
            keeps_every_update,
        )

    @staticmethod
    def _draw_faults(dice: random.Random, mortal: range) -> Faults:
        faults = Faults(noticed_after=dice.choice([0.2, 1.0]), restart_after=dice.choice([0.1, 0.5, 2.0]))
        for _ in range(dice.randint(0, 4)):
            faults = faults.kill(dice.choice(mortal), dice.uniform(0.0, 8.0))
        return faults

    @staticmethod
    def _draw_trouble(seed: int, workers: int, servers: range, faults: Faults) -> Faults:
        """Add partitions that heal before anybody is given up, clocks that jump and slow disks of servers."""
        dice, nodes = random.Random(f"trouble {seed}"), workers + len(servers)
        faults = replace(faults, patience=10.0)
        for _ in range(dice.choice([0, 0, 1, 2])):
            side = dice.sample(range(nodes), dice.randint(1, nodes - 1))
            faults = faults.partition(side, dice.uniform(0.0, 8.0), dice.choice([0.2, 1.0, 3.0]))
        for _ in range(dice.choice([0, 0, 1, 2])):
            by = dice.choice([-1, 1]) * dice.choice([0.5, 20.0, 1e6])
            faults = faults.clock_jump(dice.randrange(nodes), dice.uniform(0.0, 8.0), by)
        for _ in range(dice.choice([0, 0, 1, 2])):
            seconds = dice.choice([0.1, 0.5, 2.0])
            faults = faults.slow_disk(dice.choice(servers), dice.uniform(0.0, 8.0), seconds)
        return faults

    @staticmethod
    def _draw_crashes(dice: random.Random) -> list[tuple[str, int]]:
        points = (*POINTS, "sync", "sync")  # the moment that decides what may be told
        return [(dice.choice(points), dice.randint(0, 60)) for _ in range(dice.randint(0, 3))]

    def describe(self) -> str:
        return "\n".join(f"{f.name:>20} = {getattr(self, f.name)}" for f in fields(self))


# -- a run that is watched ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks(Problem):
    """The n-th gradient that is taken is 1 in element n of every shard, and 0 elsewhere."""

    shards: int = 1
    batches: list[tuple[int, int]] = field(default_factory=list)  # n -> whose share, and the place there

    def gradient(self, rank: int, step: int, x: Tensor) -> Tensor:
        gradient = torch.zeros_like(x)
        gradient.view(self.shards, SLOTS)[:, len(self.batches)] = 1
        self.batches.append((rank, step))
        return gradient


@dataclass
class Asked:
    """A question of a worker, and what came of it."""

    src: int
    dst: int
    tag: str
    incarnation: int
    seq: int
    seen: int  # the newest version that the worker had been told when it asked
    marks: list[int]  # of a push: the gradients in it
    version: int | None = None  # told in the answer, if one was taken


class Watched(Disk):
    """A disk beside which somebody else keeps the story: every message that no crash may undo.

    What was appended and not synced may survive a crash or not, from the end on.
    """

    def __init__(self, seed: str, **options: Any) -> None:
        super().__init__(**options)
        self.replaced = (*self.replaced, "_sure")
        self.story: list[Message] = []
        self.cut: list[list[Message]] = []  # what each crash undid
        self._sure = 0  # of the story: what a crash does not undo
        self._dice = random.Random(seed)

    def append(self, m: Message) -> None:
        before = self._since_snapshot
        try:
            super().append(m)
        finally:  # a crash after it leaves it done
            if self._since_snapshot > before:
                self.story.append(replace(m, parts=tuple(p.clone() for p in m.parts)))

    def sync(self) -> None:
        try:
            super().sync()
        finally:
            if self.keeps_every_update and not self._unsafe:
                self._sure = len(self.story)

    def snapshot(self, state: dict[str, Any]) -> None:
        before = self._snapshot
        try:
            super().snapshot(state)
        finally:
            if self._snapshot is not before:
                self._sure = len(self.story)

    def drop_unsynced(self) -> None:
        survivors = self._unsafe[: self._dice.randint(0, len(self._unsafe))]
        self._safe += survivors
        self._sure += len(survivors)
        self.cut.append(self.story[self._sure :])
        del self.story[self._sure :]
        super().drop_unsynced()


class Notes(Instrument):
    """What the nodes say of what they survived."""

    def __init__(self) -> None:
        self.of: defaultdict[int, list[str]] = defaultdict(list)

    def fault(self, node: Node, what: str) -> None:
        self.of[node.rank].append(what)


class Stuck(Exception):
    """The faults are long over, and still somebody waits."""


class Run(Simulation):
    """The run of a storm. Whoever asks a server something is overheard."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.marks = Marks(shards=storm.shards)
        self.asked: list[Asked] = []
        self.notes = Notes()
        self._last_fault = storm.weather.until
        start = torch.zeros(storm.shards * SLOTS, dtype=torch.float64)
        super().__init__(
            storm.strategy,
            lambda rank: self.marks.replica(rank, start),
            workers=storm.workers,
            steps=storm.steps,
            shards=storm.shards,
            retry=storm.retry,
            compute=storm.compute,
            network=storm.network,
            weather=storm.weather,
            faults=storm.faults,
            disk=self._disk,
            seed=storm.seed,
            observers=[self.notes],
        )

    def run(self) -> Run:
        self._look()
        super().run()
        return self

    @property
    def servers(self) -> list[Engine]:
        return self.nodes[self.workers :]

    def disk_of(self, server: Engine) -> Watched:
        disk = self._disks[server.rank]
        assert isinstance(disk, Watched)
        return disk

    def story(self, server: Engine) -> list[Message]:
        return self.disk_of(server).story

    def retell(self, server: Engine) -> Engine:
        """A server that is told the story of this one, at once and without a fault."""
        end, start = Nowhere(server.rank, len(self.nodes)), Parameters(torch.zeros_like(server.x))
        settings = {**self._common, "observers": ()}
        node = Engine(end, start, self.identity(server.rank), log=Told(self.story(server)), **settings)
        life = self.strategy.live(Node(node))
        try:
            life.send(None)
        except StopIteration:
            return node
        life.close()
        raise Stuck(f"{server.name} would wait for ever, had it been told its story at once")

    def _disk(self, rank: int) -> Disk:
        storm = self.storm
        return Watched(
            f"disk {rank} of {storm.seed}",
            keeps_every_update=storm.keeps_every_update,
            snapshot_every=storm.snapshot_every,
            crashes=storm.crashes[rank],
        )

    def _make(self, rank: int, incarnation: int, own: Replica | None = None) -> Engine:
        node = super()._make(rank, incarnation, own)
        if rank < self.workers:
            overhear(node, self.asked)
        return node

    def _restart(self, rank: int) -> None:
        self._last_fault = max(self._last_fault, self.kernel.now)
        super()._restart(rank)

    def _look(self) -> None:
        """Look now and then whether the faults are long over."""
        if self.kernel.now > self._last_fault + PATIENCE_SECONDS:
            raise Stuck(
                "; ".join(process.describe() for process in self.kernel._running if not process.ended)
            )
        self.kernel.after(PATIENCE_SECONDS / 4, self._look)


def overhear(node: Node, asked: list[Asked]) -> None:
    """Write down what this worker asks, and what it takes for the answer."""
    mailbox, seen, questions = node.mailbox, Counter[int](), dict[Question, Asked]()
    ask, answer = mailbox.ask, mailbox.answer

    async def overheard_ask(dst: int, m: Message) -> Question:
        question = await ask(dst, m)
        marks = m.body.nonzero().flatten().tolist() if m.tag == "push" else []
        questions[question] = Asked(node.rank, dst, m.tag, node.incarnation, m.seq, seen[dst], marks)
        asked.append(questions[question])
        return question

    async def overheard_answer(question: Question) -> Message:
        m = await answer(question)
        if isinstance(m, (Ack, Reply)):
            questions[question].version = m.version
            seen[question[0]] = max(seen[question[0]], m.version)
        return m

    mailbox.ask, mailbox.answer = overheard_ask, overheard_answer  # type: ignore[method-assign]


@dataclass(frozen=True)
class Told:
    """A log to read from, and nothing more."""

    story: list[Message]
    keeps_every_update = True

    def append(self, m: Message) -> None:
        return

    def sync(self) -> None:
        return

    def snapshot_is_due(self) -> bool:
        return False

    def snapshot(self, state: dict[str, Any]) -> None:
        return

    def recover(self) -> tuple[None, list[Message]]:
        return None, [replace(m) for m in self.story]

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Nowhere:
    """The end of a network on which nothing comes."""

    rank: int
    size: int

    def now(self) -> float:
        return 0.0

    def drain(self) -> Iterator[Message]:
        return iter(())

    async def recv(self, timeout: float | None = None) -> Message:
        raise Stuck("nothing comes from nowhere")

    async def send(self, dst: int, m: Message) -> None:
        return


# -- what must hold ----------------------------------------------------------------------------------------


def verdict(run: Run) -> Iterator[str]:
    """Let a storm pass, and say what should not have come of it."""
    try:
        run.run()
    except Exception as problem:  # whatever it is, nobody who trains should see it
        yield f"not everybody finishes: {type(problem).__name__}: {problem}"
        return
    yield from unfinished(run)
    for server in run.servers:
        try:
            retold = run.retell(server)
        except Exception as problem:
            yield f"{server.name} cannot be told its story: {type(problem).__name__}: {problem}"
            continue
        yield from doubled(run, server)
        yield from differing(server, retold)
        if run.storm.keeps_every_update:
            yield from forgotten(run, server, retold)
            yield from misdated(run, server)
        else:
            yield from forgotten_in_silence(run, server)
    yield from batches(run)
    yield from going_back(run) if run.storm.keeps_every_update else going_back_in_silence(run)


def unfinished(run: Run) -> Iterator[str]:
    for node, end in zip(run.nodes, run._ends, strict=True):
        if not end.has_left:
            yield f"{node.name} never finished"


def counts(run: Run, server: Engine) -> list[float]:
    """How often each gradient is in this server's model; where gradients are averaged, whether it is."""
    times = (-server.x).tolist()
    return times if isinstance(run.strategy, ADD_UP) else [float(weight > 0) for weight in times]


def acknowledged(run: Run, server: Engine) -> list[Asked]:
    return [a for a in run.asked if a.tag == "push" and a.dst == server.rank and a.version is not None]


def forgotten(run: Run, server: Node, retold: Node) -> Iterator[str]:
    """What was acknowledged is in the model, unless the algorithm itself dropped it as too old."""
    times = counts(run, server)
    missing = [mark for a in acknowledged(run, server) for mark in a.marks if times[mark] == 0]
    if len(missing) > retold.meter.dropped:
        yield f"{server.name} acknowledged gradients {missing} and has them not"


def doubled(run: Run, server: Engine) -> Iterator[str]:
    """Nothing is in the model more than once, and no push was taken twice."""
    for mark, times in enumerate(counts(run, server)):
        if times not in (0, 1):
            yield f"{server.name} has gradient {mark} {times:g} times"
    for push, times in Counter(map(identity, pushes(run.story(server)))).items():
        if times > 1:
            yield f"{server.name} took push {push} {times} times"


def pushes(story: Iterable[Message]) -> list[Message]:
    return [m for m in story if m.tag == "push"]


def identity(request: Message | Asked) -> tuple[int, int, int]:
    return request.src, request.incarnation, request.seq


def differing(server: Node, retold: Node) -> Iterator[str]:
    """The state is what the log makes of the start, to the last bit."""
    one, other = flat(server.state()), flat(retold.state())
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            yield f"{server.name} has {name} = {one.get(name)}, but its log makes it {other.get(name)}"


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """A nested state by dotted names."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}
    return {name: value.tolist() if isinstance(value, Tensor) else value}


def misdated(run: Run, server: Engine) -> Iterator[str]:
    """An acknowledgement tells the version that the push made."""
    if not isinstance(run.strategy, AT_ONCE):
        return
    made = {identity(m): version for version, m in enumerate(pushes(run.story(server)), start=1)}
    for a in acknowledged(run, server):
        if a.version != made.get(identity(a)):
            yield (
                f"{server.name} told worker {a.src} that gradients {a.marks} made version {a.version}; "
                f"they made {made.get(identity(a))}"
            )


def batches(run: Run) -> Iterator[str]:
    """At the server that keeps the pool every batch is in the model once, whoever did it.

    Where only snapshots are kept, every message that a crash undid may cost one batch: it was in the model,
    or it was handed out, and that is forgotten. Another may be done again.
    """
    done = Counter[tuple[int, int]]()
    for batch, times in zip(run.marks.batches, counts(run, run.server), strict=False):
        done[batch] += int(times)
    everything = [(rank, place) for rank in range(run.workers) for place in range(run.storm.steps)]
    if not run.storm.keeps_every_update:
        undone, missing = sum(map(len, run.disk_of(run.server).cut)), sum(not done[b] for b in everything)
        if missing > undone:
            yield f"{missing} batches are not in the model, though crashes undid only {undone} messages"
        return
    for batch in everything:
        if done[batch] != 1:
            yield f"batch {batch[1]} of worker {batch[0]} is in the model {done[batch]} times"


def marks_cut(run: Run, server: Engine) -> set[int]:
    """The gradients in what crashes undid."""
    cut = (m for story in run.disk_of(server).cut for m in pushes(story))
    return {mark for m in cut for mark in m.body.nonzero().flatten().tolist()}


def going_back(run: Run) -> Iterator[str]:
    for a in run.asked:
        if a.version is not None and a.version < a.seen:
            yield (
                f"worker {a.src} had seen version {a.seen} of {run.nodes[a.dst].name} when it asked for its "
                f"'{a.tag}', and got version {a.version}"
            )


# -- where only snapshots are kept -------------------------------------------------------------------------


def forgotten_in_silence(run: Run, server: Engine) -> Iterator[str]:
    """What is missing came after the last snapshot before a crash, and every crash is announced."""
    times, cut = counts(run, server), marks_cut(run, server)
    for a in acknowledged(run, server):
        for mark in a.marks:
            if times[mark] == 0 and mark not in cut and not isinstance(run.strategy, SyncServer):
                yield f"{server.name} acknowledged gradient {mark}, and lost it though no crash undid it"
    longest = max((len(story) for story in run.disk_of(server).cut), default=0)
    if longest > run.storm.snapshot_every:
        yield f"{server.name} lost {longest} messages, with a snapshot every {run.storm.snapshot_every}"
    announced = sum("every update after that one was lost" in note for note in run.notes.of[server.rank])
    if announced < sum(bool(story) for story in run.disk_of(server).cut):
        yield f"{server.name} lost updates in {len(run.disk_of(server).cut)} crashes, and told of {announced}"


def going_back_in_silence(run: Run) -> Iterator[str]:
    """A worker that pulls an older version than before takes note of it."""
    for rank in range(run.workers):
        newest, back = Counter[tuple[int, int]](), 0
        for a in run.asked:
            if a.src == rank and a.tag == "pull" and a.version is not None:
                back += a.version < newest[a.incarnation, a.dst]
                newest[a.incarnation, a.dst] = a.version
        noted = sum("went back to version" in note for note in run.notes.of[rank])
        if noted != back:
            yield f"worker {rank} pulled an older version {back} times, and noted it {noted} times"


# -- from the command line ---------------------------------------------------------------------------------


def command(seed: int, keeps_every_update: bool = True) -> str:
    """What to type to see one seed again."""
    return f"python tests/sim/storm.py {seed}{'' if keeps_every_update else ' --memory'}"


def tell(seeds: range, keeps_every_update: bool) -> bool:
    """Print what goes wrong in these seeds; whether nothing does."""
    well = True
    for seed in seeds:
        storm = Storm.draw(seed, keeps_every_update)
        if len(seeds) == 1:
            print(storm.describe())
        for problem in verdict(Run(storm)):
            well = False
            print(f"{command(seed, keeps_every_update)}  # {problem[:200]}", flush=True)
    return well


def tabulate(seeds: range, name: str) -> bool:
    """Print how many of the seeds catch the mutant of that name, or all of them; whether each is caught."""
    import pytest
    from mutants import MUTANTS

    well = True
    for mutant in MUTANTS:
        if name not in ("all", mutant.name):
            continue
        with pytest.MonkeyPatch.context() as patch:
            mutant.apply(patch)
            caught = [seed for seed in seeds if any(verdict(Run(Storm.draw(seed, not mutant.memory))))]
        well = well and bool(caught)
        print(
            f"{len(caught) / len(seeds):7.1%} of {len(seeds)}, first {caught[:3]}: {mutant.name}", flush=True
        )
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seeds", help="one seed, or a range of them as 0:500")
    parser.add_argument("--memory", action="store_true", help="servers keep snapshots only")
    parser.add_argument("--mutant", help="the name of a mutant, or 'all'")
    given = parser.parse_args()
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    torch.set_num_threads(1)
    return 0 if (tabulate(seeds, given.mutant) if given.mutant else tell(seeds, not given.memory)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
