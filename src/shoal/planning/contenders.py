"""Contenders: every strategy, period, codec and number of workers that a plan looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shoal.codecs import CODECS
from shoal.core.catalogue import split_options
from shoal.core.codec import Codec
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Setting, Strategy

PERIODS = (4, 16, 64, 256)
"""Steps between two exchanges that are looked at, where a strategy has a choice."""

LEAST_ROUNDS = 4
"""Exchanges in a run below which a period is too long for it."""

PLANNED = (
    *("sync", "local", "post_local", "bmuf", "slowmo", "diloco", "streaming_diloco"),
    *("sync_server", "hierarchical", "asgd", "staleness_aware", "softsync", "ssp", "dcasgd", "downpour"),
    *("hogwild", "easgd", "eamsgd", "gossip", "gossipgrad", "dpsgd", "sgp", "adpsgd", "choco", "strom"),
)
"""Strategies whose exchanges have a formula in `run_time`; a plan looks at no others."""


def planned(words: Iterable[str] | None, refused: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """The strategies to look at: all that can run, or those that were named; and the options they name.

    `refused` says of some why they cannot run. Raises ValueError if one was named that cannot be planned.
    """
    if words is None:
        return [(word, {}) for word in PLANNED if word not in refused]
    named = [split_options(text) for text in words]
    if not named:
        raise ValueError("no strategy is named; name one, such as 'sync', or leave them out to look at all")
    for word, _ in named:
        if word not in (*PLANNED, "single"):
            raise ValueError(
                f"no plan looks at {word!r}: there is no formula for what it exchanges; try it with "
                "shoal compare"
            )
        if word in refused:
            raise ValueError(refused[word])
    checked = [(word, STRATEGIES.check(word, **options)) for word, options in named]
    return [(word, options) for word, options in checked if word != "single"]


def one_sided_words() -> dict[str, str]:
    """Strategies whose workers write into the memory of a server, and why no network can run them."""
    return {
        word: f"{word!r} shares the memory of one machine; leave --network out, or take 'asgd'"
        for word in PLANNED
        if _made(word, ()).one_sided
    }


@dataclass(frozen=True)
class Contender:
    """One setting of a run."""

    word: str
    workers: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    codec: str = "none"
    servers: int = 1  # shards of each server

    @property
    def strategy(self) -> Strategy:
        """The strategy with these options."""
        return _made(self.word, tuple(self.options.items()))

    @property
    def coder(self) -> Codec:
        """The codec with its options."""
        return _read(self.codec)

    @property
    def period(self) -> int:
        """Steps between two exchanges."""
        return int(self.options.get("period") or self.options.get("n_push") or 1)

    @property
    def name(self) -> str:
        """bmuf-8, every 16, one_bit."""
        often = f" every {self.period}" if self.period > 1 else ""
        plain = self.codec == "none" == self.strategy.default_codec
        coded = "" if plain else f", {self.codec}"
        return f"{self.word}-{self.workers}{often}{coded}" if self.workers > 1 else self.word

    @property
    def arguments(self) -> list[str]:
        """The words of the command line that ask for it, but for the strategy's own."""
        dotted = [word for name, value in self.options.items() for word in (f"--strategy.{name}", str(value))]
        coded = ["--codec", self.codec] if self.codec != self.strategy.default_codec else []
        return ["-n", str(self.workers), *dotted, *coded]


@cache
def _made(word: str, options: tuple[tuple[str, Any], ...]) -> Strategy:
    return STRATEGIES.make(word, **dict(options))


@cache
def _read(codec: str) -> Codec:
    return CODECS.read(codec)


SINGLE = Contender("single", 1)
"""One worker: what every other is compared with."""


def crews(most: int) -> list[int]:
    """Powers of two up to `most`, and `most` itself; from 2 on."""
    powers = [1 << k for k in range(1, most.bit_length()) if 1 << k <= most]
    return sorted({*powers, most}) if most > 1 else []


def contenders(
    most: int,
    steps: int,
    codecs: Iterable[str],
    *,
    words: Iterable[str] | None = None,
    refused: Mapping[str, str] | None = None,
    own_loop: bool = False,
) -> list[Contender]:
    """One worker, and every setting on up to `most` workers.

    `steps` is the length of the run on one worker, and `codecs` are words. `refused` says of strategies why
    they cannot run. `own_loop`: for a script. Raises ValueError if one of `words` fits no number of workers.
    """
    known, found = list(codecs), [SINGLE]
    for word, own in planned(words, refused or {}):
        fitting: list[Contender] = []
        for workers in crews(most):
            for options in [own] if own else _options(word, max(1, steps // workers)):
                fitting += _coded(word, workers, options, known, own_loop)
        if words is not None and not fitting:
            raise ValueError(_why_not(word, own, most, own_loop))
        found += fitting
    return found


def _coded(
    word: str, workers: int, options: Mapping[str, Any], codecs: Sequence[str], own_loop: bool
) -> Iterator[Contender]:
    strategy = _made(word, tuple(options.items()))
    for codec in {strategy.default_codec: None, **dict.fromkeys(codecs)}:
        coder = _read(codec)
        if codec not in codecs or (own_loop and coder.needs_products):
            continue
        try:
            strategy.check(Setting(workers, coder, own_loop=own_loop))
        except ValueError:
            continue  # these do not go together, or not on so many workers
        yield Contender(word, workers, options, codec)


def _why_not(word: str, options: Mapping[str, Any], most: int, own_loop: bool) -> str:
    """Why a strategy with these options runs on no number of workers up to `most`."""
    if most == 1:
        return f"a plan for one worker knows 'single' alone; give -n 2 or more to look at {word!r}"
    strategy = _made(word, tuple(options.items()))
    try:
        strategy.check(Setting(most, _read(strategy.default_codec), own_loop=own_loop))
    except ValueError as error:
        return f"strategy {word!r} fits no number of workers up to {most}: {error}"
    return f"strategy {word!r} goes with no codec that a plan can look at here"


def _options(word: str, steps: int) -> list[dict[str, Any]]:
    """The options to look at in a run of so many steps; each says how often workers exchange."""
    periods = [period for period in PERIODS if period * LEAST_ROUNDS <= steps] or [
        max(1, steps // LEAST_ROUNDS)
    ]
    if word == "downpour":
        return [{}, *({"n_push": period, "n_fetch": period} for period in periods)]
    if "period" not in STRATEGIES.options(word):
        return [{}]
    return [{"period": period, **_beside(word, period, steps)} for period in periods]


def _beside(word: str, period: int, steps: int) -> dict[str, Any]:
    """What else a period asks for."""
    if word == "bmuf":
        return {"warmup": 0}  # its own default is a period of averages at every step
    if word == "post_local":
        return {"switch": steps // 10}
    if word == "streaming_diloco":
        fragments = min(4, period)
        return {"fragments": fragments, "overlap": min(5, period // fragments - 1)}
    return {}
