"""Print docs/compatibility.md: optimizers × strategies and loaders × `shard`, each pair tried out.

python docs/compatibility.py > docs/compatibility.md
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import shoal
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.served import ServedReplica, check_optimizer
from shoal.sim import Compute, Network
from shoal.sim.simulation import Simulation
from shoal.strategies import STRATEGIES
from shoal.strategies.single import Single
from shoal.vocabulary.strategy import Setting, Strategy

PAGE = """\
# Which optimizers and loaders work

- [Optimizers and strategies](#optimizers-and-strategies)
- [Loaders and `shard`](#loaders-and-shard)
- [What your own loop refuses](#what-your-own-loop-refuses)

`python docs/compatibility.py` writes the tables by trying every pair; a test compares the page with the code.

## Optimizers and strategies

Where your optimizer runs in a script that calls `attach`: two workers, or one with `single`.

{strategies}

{optimizers}

{refusals}

- Several optimizers, stepped at different times: `attach([model, other], [optimizer, another])`.
  A server must not mix their gradients: then `softsync` needs `wait=true`, and `downpour` `n_push=1`.
- One worker under a strategy without a server trains like `single`. The exceptions are `muloco`, which steps
  hidden matrices by Muon, and `demo`, which takes all steps itself and is not in the table.
- `sandblaster` is an optimizer itself: it trains with `shoal.run` and `shoal.minimize`, not in your own loop.
  Nor does `ensemble`.
- An optimizer of your own works as Adam does, also if its steps give parameters new tensors (`p.data = ...`).
  What its steps change in its groups beside learning rates, as Schedule-Free counts its steps there, is saved
  in checkpoints. With several servers the step of an element must depend on that element alone; `attach`
  tries it out.

## Loaders and `shard`

Four workers read {samples} samples in batches of {batch}. The table says how often a sample comes in a pass,
how many batches a worker gets, whether the order of the next pass differs, and whether `len(shard(loader))`
is known.

{loaders}

{refused_loaders}

## What your own loop refuses

The guide has [the table](guide.md#what-shoal-refuses-in-your-loop): strategies, codecs, optimizers, models,
loaders, calls. Also refused, with an error that gives the reason:

- **A strategy with a server that you wrote**, under `shoal run`: use `shoal.run` or `torchrun`.
- **Options of `shoal run`**: `--balance`, `--crew`, `--scale-lr`, `--grow-batch`, `--largest-batch`. Your
  script owns the loader and the optimizer.
- **Checkpoints** of [another number of workers or servers](checkpoints.md#your-own-loop), `--checkpoint` with
  `--max-workers`, and `--checkpoint` with an optimizer that wraps another one.
- **Data**: fewer samples than workers.
- **Calls**: `optimizer.step()` inside `common_model()`.
- **[Groups](groups.md)**: `GradScaler`; codecs and optimizers that look at whole matrices.
- **[Lightning, Fabric, transformers, Accelerate](frameworks.md)**: each section there has a list.
"""

# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    **{
        name: (name, {})
        for name in (
            *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
            *("Adafactor", "Muon", "SparseAdam", "LBFGS"),
        )
    },
}
"""How the table calls an optimizer, its class in torch.optim, and options."""

NAMES = re.compile(rf"\b({'|'.join(name for name, _ in OPTIMIZERS.values())})\b")
fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)


class Trial(AttachedReplica):
    """A worker of a small model, that counts the steps of its optimizer."""

    def __init__(self, word: str, rank: int = 0) -> None:
        name, options = OPTIMIZERS[word]
        sparse = name == "SparseAdam"
        self._model = nn.Embedding(4, 6, sparse=True) if sparse else nn.Linear(6, 4, bias=False)
        with torch.no_grad():
            self._model.weight.copy_(torch.arange(24).view(4, 6).sin())
        self._batch = torch.tensor([rank, 2]) if sparse else torch.arange(6.0) + rank
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            self._model.parameters(), lr=0.01, **options
        )
        super().__init__(self._model, self.optimizer)

    async def gradient(self) -> Any:
        self.turn_to(0)
        self.evaluate(self._closure)
        return self.collect()

    async def step(self, check: Callable[[float | None], None]) -> int:
        gradient = await self.gradient()
        check(gradient.loss)
        self.descend(gradient.vector)
        return gradient.count

    def _closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self._model(self._batch).square().sum()
        loss.backward()
        return loss


def place_of(word: str, strategy: Strategy, template: Trial) -> str:
    """Where the optimizer runs in a step of virtual time."""
    counted = Counter[str]()

    def counting(place: str, method: Callable[..., None]) -> Callable[..., None]:
        def count(*arguments: Any) -> None:
            counted[place] += 1
            method(*arguments)

        return count

    at_worker = counting("at each worker", AttachedReplica.descend)
    at_server = counting("at the server", ServedReplica.apply)
    with patch.object(Trial, "descend", at_worker), patch.object(ServedReplica, "apply", at_server):
        Simulation(
            strategy,
            lambda rank: Trial(word, rank),
            workers=workers_of(strategy),
            steps=1,
            served=template.served,
            centre=template.x,
            layout=template.layout,
            compute=Compute(mean=1.0),
            network=Network(latency=0.01),
        ).run()
    return "at the server" if counted["at the server"] else "at each worker" if counted else "as plain SGD"


def workers_of(strategy: Strategy) -> int:
    return 1 if isinstance(strategy, Single) else 2


def attaches(strategy: Strategy) -> bool:
    """Whether it trains in a loop of the user's own, and by the user's optimizer."""
    try:
        strategy.check(Setting(workers_of(strategy), own_loop=True))
    except ValueError:
        return False
    return not strategy.own_optimizer


ATTACHED = [word for word in STRATEGIES if attaches(STRATEGIES.make(word))]


class Footnotes:
    """Sentences, each with a number; those that differ in the name of an optimizer only are one."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, str]] = {}

    def mark(self, sentence: str) -> str:
        """The sign that refers to a sentence."""
        number, _ = self._seen.setdefault(NAMES.sub("", sentence), (len(self._seen) + 1, sentence))
        return f"({number})"

    def __str__(self) -> str:
        lines = (
            f"{number}. {sentence[0].upper()}{sentence[1:]}." for number, sentence in self._seen.values()
        )
        return "\n".join(fill(line, subsequent_indent="   ") for line in lines)


def optimizer_cell(word: str, strategy: Strategy, notes: Footnotes) -> str:
    """Where it runs, or the number of the sentence that refuses it: at all, or with two servers."""
    template = Trial(word)
    if never := refusal(strategy, template.optimizer, servers=1):
        return f"no {notes.mark(never)}"
    place = place_of(word, strategy, template)
    cut = refusal(strategy, template.optimizer, servers=2)
    return f"at one server {notes.mark(cut)}" if cut else place


def refusal(strategy: Strategy, optimizer: torch.optim.Optimizer, servers: int) -> str:
    """The sentence with which attach() refuses the optimizer; empty if it takes it."""
    try:
        check_optimizer(strategy, optimizer, workers_of(strategy), servers)
    except ValueError as refused:
        return str(refused)
    return ""


def optimizer_table() -> tuple[str, str, str]:
    """The strategies that behave alike, optimizers below each other with those strategies, the refusals."""
    notes = Footnotes()
    cells = {
        (word, strategy): optimizer_cell(word, STRATEGIES.make(strategy), notes)
        for word in OPTIMIZERS
        for strategy in ATTACHED
    }
    columns = alike(ATTACHED, lambda strategy: [cells[word, strategy] for word in OPTIMIZERS])
    rows = alike(OPTIMIZERS, lambda word: [cells[word, strategy] for strategy in ATTACHED])
    heads = [f"`{first}`" + (f" and {len(others)} more" if others else "") for first, *others in columns]
    groups = (
        fill(f"- `{first}` and {len(others)} more: {quoted(others)}", subsequent_indent="  ")
        for first, *others in columns
        if others
    )
    table = [[", ".join(words), *(cells[words[0], column[0]] for column in columns)] for words in rows]
    return "\n".join(groups), markdown(["", *heads], table), str(notes)


# -- loaders ---------------------------------------------------------------------------------------

WORKERS, SAMPLES, BATCH = 4, 103, 8
NUMBERS = TensorDataset(torch.arange(SAMPLES))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(SAMPLES))


class WithoutLength(torch_data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(SAMPLES).split(BATCH))


def distributed(rank: int, shares: int) -> DataLoader[Any]:
    return DataLoader(NUMBERS, BATCH, sampler=torch_data.DistributedSampler(NUMBERS, shares, rank))


WEIGHTED = torch_data.WeightedRandomSampler([0.0] * 50 + [1.0] * 53, SAMPLES)
LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "`batch_size=8`": lambda rank: DataLoader(NUMBERS, BATCH),
    "`shuffle=True`": lambda rank: DataLoader(NUMBERS, BATCH, shuffle=True),
    "`shuffle=True, drop_last=True`": lambda rank: DataLoader(NUMBERS, BATCH, shuffle=True, drop_last=True),
    "`shuffle=True, num_workers=1`": lambda rank: DataLoader(NUMBERS, BATCH, shuffle=True, num_workers=1),
    "`sampler=SubsetRandomSampler(...)`": lambda rank: DataLoader(
        NUMBERS, BATCH, sampler=torch_data.SubsetRandomSampler(range(SAMPLES))
    ),
    "`sampler=WeightedRandomSampler(...)`": lambda rank: DataLoader(NUMBERS, BATCH, sampler=WEIGHTED),
    "a sampler without a length": lambda rank: DataLoader(NUMBERS, BATCH, sampler=WithoutLength()),
    "`batch_sampler=BatchSampler(...)`": lambda rank: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), BATCH, False)
    ),
    "`batch_size=None, shuffle=True`": lambda rank: DataLoader(NUMBERS, batch_size=None, shuffle=True),
    "an `IterableDataset`": lambda rank: DataLoader(Stream(), BATCH),
    "a subclass of `DataLoader` with its own `__iter__`": lambda rank: OwnLoader(NUMBERS, BATCH),
    "`sampler=DistributedSampler(...)` for this worker": lambda rank: distributed(rank, WORKERS),
    "`sampler=DistributedSampler(...)` for other shares": lambda rank: distributed(0, 2),
}


@contextmanager
def worker(rank: int) -> Iterator[None]:
    with (
        patch("shoal.api.shard._rank", lambda: rank),
        patch("shoal.api.shard._workers", lambda: WORKERS),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def one_pass(shares: shoal.api.shard.Shard) -> list[list[int]]:
    return [(b[0] if isinstance(b, (list, tuple)) else b).reshape(-1).tolist() for b in shares]


def loader_cells(make: Callable[[int], DataLoader[Any]], notes: Footnotes) -> list[str]:
    """How often samples come, the batches of a worker, whether the order changes, whether it has a length."""
    passes, lengths = [], []
    try:
        for rank in range(WORKERS):
            with worker(rank):
                shares = shoal.shard(make(rank))
                passes.append((one_pass(shares), one_pass(shares)))
                lengths.append(known_length(shares))
    except ValueError as refused:
        return [f"no {notes.mark(str(refused))}", "", "", ""]
    first, second = ([own[turn] for own in passes] for turn in range(2))
    numbers = sorted({len(own) for own in first})
    changes = any(a != b for a, b in zip(first, second, strict=True))
    return [
        how_often(Counter(chain(*chain(*first)))),
        " or ".join(map(str, numbers)),
        "yes" if changes else "no",
        "yes" if lengths == [len(own) for own in first] else "no",
    ]


def how_often(seen: Counter[int]) -> str:
    times, missing = set(seen.values()), SAMPLES - len(seen)
    if times == {1}:
        return f"once; {missing} are dropped" if missing else "once"
    return "as drawn" if missing else "once; a few twice, as that sampler fills up"


def known_length(shares: shoal.api.shard.Shard) -> int | None:
    try:
        return len(shares)
    except TypeError:
        return None


def loader_table() -> tuple[str, str]:
    """The table of loaders, and the refusals."""
    notes = Footnotes()
    rows = [[name, *loader_cells(make, notes)] for name, make in LOADERS.items()]
    return markdown(["your loader", "a sample comes", "batches", "new order", "length"], rows), str(notes)


# -- the page --------------------------------------------------------------------------------------


def alike(words: Sequence[str], what: Callable[[str], list[str]]) -> list[list[str]]:
    """The words in groups for which `what` is the same."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for word in words:
        groups[tuple(what(word))].append(word)
    return list(groups.values())


def quoted(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def page() -> str:
    """The whole of docs/compatibility.md."""
    strategies, optimizers, refusals = optimizer_table()
    loaders, refused_loaders = loader_table()
    return PAGE.format(
        strategies=strategies,
        optimizers=optimizers,
        refusals=refusals,
        samples=SAMPLES,
        batch=BATCH,
        loaders=loaders,
        refused_loaders=refused_loaders,
    )


if __name__ == "__main__":
    print(page(), end="")
