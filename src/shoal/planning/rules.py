"""Rules of thumb: which family of methods suits a model, its machines and the links between them.

Thresholds are on R, the time of one dense average over that of a step, and on the spread of step times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log2

from shoal.collectives import LinkCost
from shoal.collectives.choice import ALGORITHMS, cheapest
from shoal.planning.contenders import Contender
from shoal.planning.workload import Workload

QUIET = 0.5  # R up to which dense averages at every step are affordable
SLOW_LINK = 5.0  # R from which even compressed ones are not
UNEVEN = 0.15  # spread of step times from which nobody should wait for all
SHORT_JOB = 60.0  # seconds on one worker
LATENCIES = 10.0  # a step shorter than so many latencies for each round of an average is too short
SMALL_SHARE = 3_000  # samples of a worker
MANY_AVERAGED = 32  # workers, with plain model averaging
LARGE_NET = 20  # parameters for each sample
CONNECTED = 0.9  # share of the parameters
SMALL_TALK = 0.05  # of the time, where averages are rare

FAMILIES = {
    2: ("single",),
    3: ("sync",),
    4: ("sync_server", "softsync"),
    5: ("sync",),  # with a codec
    6: ("bmuf", "diloco", "local", "post_local", "slowmo", "streaming_diloco"),
    7: ("downpour", "ssp", "easgd", "eamsgd", "asgd", "staleness_aware", "dcasgd", "hogwild", "hierarchical"),
    8: ("sgp", "adpsgd", "dpsgd", "gossip", "gossipgrad", "choco", "strom"),
}
"""The strategies that each rule is about."""


@dataclass(frozen=True)
class Situation:
    """What the rules look at."""

    step: float  # seconds of a gradient
    nbytes: float  # of the model
    link: LinkCost
    workers: int
    spread: float = 0.0  # standard deviation of step times over their mean
    slowest: float = 1.0  # how many times as long the slowest worker takes
    job: float | None = None  # seconds of the whole job on one worker
    fits: bool = True  # whether the model fits into a machine's memory
    by_epochs: bool = False  # whether accuracy per epoch counts, not time
    samples: float = inf  # of the training data
    batch: int = 1

    @property
    def mean_seconds(self) -> float:
        """Seconds of a dense average, by the cheapest algorithm."""
        if self.workers == 1:
            return 0.0
        name = cheapest(self.workers, self.nbytes, self.link)
        return ALGORITHMS[name].cost(self.workers, self.nbytes, self.link)

    @property
    def ratio(self) -> float:
        """R: the average over the step."""
        return self.mean_seconds / self.step if self.step else float("inf")

    @property
    def period(self) -> int:
        """Steps between two averages such that these take a twentieth of the time."""
        return max(1, round(self.ratio / SMALL_TALK)) if isfinite(self.ratio) else 1

    @property
    def has_enough(self) -> bool:
        """Whether there are samples for the block momentum of so many workers: a period for each pair."""
        return self.samples >= self.period * self.batch * self.workers**2


@dataclass(frozen=True)
class Rule:
    """A rule that applies, and why."""

    number: int
    because: str

    @property
    def family(self) -> Sequence[str]:
        """The strategies that it points to."""
        return FAMILIES.get(self.number, ())

    def covers(self, contender: Contender) -> bool:
        """Whether it points to this setting."""
        if self.number in (3, 5) and contender.word == "sync":
            return (contender.codec == "none") == (self.number == 3)
        return contender.word in self.family


def rule_for(s: Situation) -> Rule:
    """The first rule that applies."""
    return next(_rules(s))


def _rules(s: Situation) -> Iterator[Rule]:
    r = f"an average takes {s.ratio:.2g} times as long as a step"
    if not s.fits:
        yield Rule(1, "the model does not fit into one machine: cut it first, with shoal split")
    if s.workers == 1:
        yield Rule(2, "there is one worker")
    if s.step < LATENCIES * s.link.latency * log2(s.workers):
        yield Rule(
            2, f"a step of {1e3 * s.step:.3g} ms is shorter than what messages wait: stay on one machine"
        )
    if s.job is not None and s.job < SHORT_JOB:
        yield Rule(2, f"the whole job takes {s.job:.2g} s on one worker: stay on one machine")
    uneven, has_slow = s.spread > UNEVEN, s.slowest > 1 + UNEVEN
    if s.by_epochs:
        yield Rule(3, "accuracy per epoch is what counts: average gradients at every step")
    if s.ratio <= QUIET and not (uneven or has_slow):
        yield Rule(3, f"{r}: average gradients at every step")
    if s.ratio <= QUIET and uneven:
        yield Rule(4, f"step times differ by {s.spread:.0%}: do not wait for the slowest")
    if QUIET < s.ratio <= SLOW_LINK:
        yield Rule(5, f"{r}: compress the gradients")
    seldom = f"{r}: average models every {s.period} steps or so, so that it takes 5 % of the time"
    if s.ratio > SLOW_LINK and s.has_enough:
        yield Rule(6, seldom)
    if has_slow:
        yield Rule(7, f"the slowest worker takes {s.slowest:.2g} times as long: wait for nobody")
    yield Rule(6, f"{seldom}; for so many workers there are few samples: take fewer workers")


REASONS = {
    2: "one worker: nothing to wait for",
    3: "gradients of all at every step: the most accurate per epoch, where the link can take it",
    4: "a server that does not wait for the slowest",
    5: "compressed gradients at every step: the link, not the step, is what takes the time",
    6: "models averaged now and then: the link is too slow for every step",
    7: "a server and workers that wait for nobody",
    8: "neighbour to neighbour: no server, and nobody waits for all",
}
"""What a winner of each family has going for it."""


def reason_for(contender: Contender) -> Rule:
    """The rule that explains this choice."""
    coded = contender.word == "sync" and contender.codec != "none"
    number = 5 if coded else next((n for n, words in FAMILIES.items() if contender.word in words), 3)
    return Rule(number, REASONS[number])


def warnings(contender: Contender, workload: Workload) -> list[str]:
    """What to beware of with this choice."""
    samples, parameters = workload.samples, workload.parameters
    told, share = [], samples // contender.workers
    if contender.workers > 1 and share < SMALL_SHARE:
        told.append(
            f"a worker's share is {share:,} samples, below {SMALL_SHARE:,}: expect to need more epochs"
        )
    if parameters > LARGE_NET * samples:
        told.append(
            f"{parameters:,} parameters for {samples:,} samples: a large net on little data generalises "
            "badly, whoever trains it"
        )
    if contender.workers > 1 and workload.connected > CONNECTED:
        told.append(
            f"{workload.connected:.0%} of the parameters are in fully connected layers, which send most and "
            "share nothing: convolutional and recurrent nets gain more from many workers"
        )
    if contender.word in FAMILIES[7] and contender.word not in ("easgd", "eamsgd", "hierarchical"):
        told.append("nobody waits at first either: start from a model that has been trained for a while")
    if contender.word == "local" and contender.workers > MANY_AVERAGED:
        told.append(f"more than {MANY_AVERAGED} models averaged plainly move slowly: bmuf adds momentum")
    return told
