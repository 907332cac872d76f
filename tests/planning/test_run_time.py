"""The formulas beside the simulator, on empty numerics: every family, fast and slow links, with a profile.

Formulas hold on average over a long run. They leave out how a run begins, when all workers queue at once, and
take waiting times in queues for their mean. Both show in runs as short as these, so the tolerance is 20 %:
enough to see a forgotten latency or a factor of the number of workers, and less than what separates families.
"""

from __future__ import annotations

from dataclasses import replace
from time import process_time
from typing import Any

import pytest
import torch
from torch import nn

from shoal.cli.compare import check_strategies
from shoal.codecs import CODECS
from shoal.collectives import LinkCost
from shoal.launch.join import choose_codec, choose_mean
from shoal.planning.contenders import PLANNED, SINGLE, Contender, contenders, crews
from shoal.planning.probing import refused_by
from shoal.planning.run_time import OWN_PASSES, expected_largest, run_cost
from shoal.planning.workload import UNCOMPRESSED, CodecCost, Site, Workload
from shoal.sim import Compute, Network
from shoal.sim.hardware import Handling, Machine
from shoal.strategies import STRATEGIES
from shoal.testing import Slope, simulate

ELEMENTS, STEPS = 20_000, 64
PROFILED = Machine(send=Handling(1e-4, 2e-9), receive=Handling(1e-4, 2e-9), vectors=Handling(5e-6, 3e-10))
ONE_HOST = replace(PROFILED, cores=8, per_host=8, maps_memory=True)
CODED = {"one_bit": CodecCost(1 / 64, 1 / 64, kept=2)}


def both(
    contender: Contender, network: str, compute: str = "20ms,10%", machine: Machine = PROFILED
) -> tuple[float, float, float]:
    """Seconds by the formulas and in the simulator, and the ratio of the bytes."""
    links, step, workers = Network.parse(network), Compute.parse(compute), contender.workers
    workload = Workload(
        "slope", STEPS * workers, 1, ELEMENTS, itemsize=8, codecs={"none": UNCOMPRESSED, **CODED}
    )
    cost = run_cost(contender, workload, lambda nodes, codec, served: Site(links, machine, step))
    codec = CODECS.read(contender.codec)
    settings: dict[str, Any] = {"network": links, "compute": step, "machine": machine, "codec": codec}
    link = LinkCost.of_network(links.latency, links.bandwidth)
    mean = choose_mean("auto", None, codec, workers, link, machine.maps_memory)
    done = simulate(
        contender.strategy,
        Slope(),
        workers=workers,
        steps=STEPS,
        start=[0.0] * ELEMENTS,
        mean=mean,
        **settings,
    )
    sent = sum(node.meter.bytes_sent for node in done.nodes)
    return cost.seconds, done.seconds, cost.nbytes / max(1, sent)


@pytest.mark.parametrize(
    ("contender", "network"),
    [
        (Contender("single", 1), "1Gbit,100us"),
        (Contender("sync", 4), "1Gbit,100us"),
        pytest.param(Contender("sync", 16), "20Mbit,10ms", marks=pytest.mark.soak),
        *(
            pytest.param(Contender("sync", workers, codec="one_bit"), "100Mbit,2ms", marks=pytest.mark.soak)
            for workers in (2, 4)
        ),
        (Contender("bmuf", 8, {"period": 8, "warmup": 0}), "20Mbit,10ms"),
        pytest.param(
            Contender("post_local", 8, {"period": 8, "switch": 6}), "100Mbit,2ms", marks=pytest.mark.soak
        ),
        pytest.param(
            Contender("streaming_diloco", 4, {"period": 16, "overlap": 3}),
            "20Mbit,10ms",
            marks=pytest.mark.soak,
        ),
        (Contender("sync_server", 4), "100Mbit,2ms"),
        pytest.param(Contender("hierarchical", 8), "100Mbit,2ms", marks=pytest.mark.soak),
        pytest.param(Contender("asgd", 16), "1Gbit,100us", marks=pytest.mark.soak),
        pytest.param(Contender("asgd", 4), "20Mbit,10ms", marks=pytest.mark.soak),
        pytest.param(
            Contender("downpour", 4, {"n_push": 4, "n_fetch": 4}), "100Mbit,2ms", marks=pytest.mark.soak
        ),
        (Contender("easgd", 8, {"period": 4}), "1Gbit,100us"),
        pytest.param(Contender("hogwild", 4), "100Mbit,2ms", marks=pytest.mark.soak),
        pytest.param(Contender("gossip", 8), "100Mbit,2ms", marks=pytest.mark.soak),
        pytest.param(Contender("dpsgd", 8), "20Mbit,10ms", marks=pytest.mark.soak),
        pytest.param(Contender("sgp", 8), "100Mbit,2ms", marks=pytest.mark.soak),
        (Contender("adpsgd", 8), "100Mbit,2ms"),
        pytest.param(Contender("choco", 8), "100Mbit,2ms", marks=pytest.mark.soak),
    ],
    ids=lambda value: value.name if isinstance(value, Contender) else value,
)
def test_formulas_agree_with_the_simulator(contender: Contender, network: str):
    formula, simulated, sent = both(contender, network)
    assert formula == pytest.approx(simulated, rel=0.2)
    if contender.workers > 1 and not contender.strategy.one_sided:  # the simulator counts no shared memory
        assert sent == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    "contender",
    [Contender("sync", 2), Contender("sync", 8), Contender("bmuf", 4, {"period": 8, "warmup": 0})],
)
def test_formulas_agree_with_the_simulator_where_averages_are_formed_in_mapped_memory(contender: Contender):
    formula, simulated, sent = both(contender, "100Gbit,5us", "2ms", ONE_HOST)
    assert formula == pytest.approx(simulated, rel=0.1)
    assert sent == pytest.approx(1, abs=0.2)


def test_a_slow_worker_holds_up_those_who_average_and_not_those_who_help():
    for word in ("sync", "adpsgd"):
        formula, simulated, _ = both(Contender(word, 4), "1Gbit,100us", "20ms,0%,2:3x")
        assert formula == pytest.approx(simulated, rel=0.2), word


def test_lost_messages_delay_an_average():
    formula, simulated, _ = both(Contender("sync", 4), "100Mbit,2ms,1%")
    assert formula == pytest.approx(simulated, rel=0.2)


def test_processes_of_one_machine_share_its_cores():
    crowded = Machine(cores=2, per_host=4, slowdown=(1.0, 1.3))
    formula, simulated, _ = both(Contender("sync", 4), "100Gbit,10us", machine=crowded)
    assert formula == pytest.approx(simulated, rel=0.2)
    assert formula > STEPS * 0.02 * 2 * 1.3  # four on two cores, which slow each other down


def test_a_thousand_settings_are_priced_in_seconds_also_for_a_thousand_workers():
    workload = Workload("big", 10_000_000, 64, 25_000_000, codecs={"none": UNCOMPRESSED, **CODED})
    site = Site(Network.parse("1Gbit,200us"), PROFILED, Compute(0.05, 0.1))
    listed = contenders(1024, 5 * 156_250, ("none", "one_bit"))
    assert len(listed) > 1000
    began = process_time()
    costs = {c: run_cost(c, workload, lambda nodes, codec, served: site, 5) for c in listed}
    assert process_time() - began < 30
    assert all(cost.seconds > 0 for cost in costs.values())
    assert len({c.word for c in costs}) > 20


def test_a_strategy_without_a_formula_is_refused_and_every_other_has_one():
    assert set(OWN_PASSES) == {*PLANNED, "single"}
    assert set(PLANNED) <= set(STRATEGIES)
    with pytest.raises(ValueError, match="no plan looks at 'sandblaster': there is no formula"):
        contenders(4, 1000, ("none",), words=["sync", "sandblaster"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no strategy is named"),
        (["single:period=8"], "strategy 'single' has no option 'period'"),
        (["sync", "hierarchical:groups=99"], "strategy 'hierarchical' fits no number of workers up to 4: "),
    ],
)
def test_what_is_named_and_cannot_be_looked_at_is_refused(words: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        contenders(4, 1000, ("none",), words=words)


def test_one_worker_has_nobody_to_exchange_with():
    with pytest.raises(ValueError, match="a plan for one worker knows 'single' alone; give -n 2 or more"):
        contenders(1, 1000, ("none",), words=["sync"])
    assert contenders(1, 1000, ("none",), words=["single"]) == contenders(1, 1000, ("none",)) == [SINGLE]


def test_every_number_of_workers_and_only_what_goes_together():
    assert crews(8) == [2, 4, 8]
    assert crews(6) == [2, 4, 6]
    assert crews(1) == []
    listed = contenders(8, 1000, ("none", "one_bit"))
    assert listed[0] == SINGLE
    assert {c.workers for c in listed} == {1, 2, 4, 8}
    assert not [c for c in listed if c.word == "dpsgd" and c.codec != "none"]  # it sends models exactly
    assert max(c.period for c in listed if c.workers == 8) * 4 <= 1000 / 8


def parsed(arguments: list[str], word: str) -> Contender:
    """The setting that `shoal compare` reads from such words, but for its strategy."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    dotted = {name.removeprefix("--strategy."): v for name, v in given.items() if name.startswith("--s")}
    options = check_strategies(word, dotted)[word]
    codec = choose_codec(given.get("--codec"), STRATEGIES.make(word, **options))
    return Contender(word, int(given["-n"]), options, CODECS.text_of(codec))


def test_the_printed_words_ask_for_the_same_setting():
    listed = contenders(4, 1000, ("none", "threshold", "one_bit"))
    assert {c.codec for c in listed if c.word == "strom"} == {"none", "threshold", "one_bit"}
    for contender in listed:
        assert parsed(contender.arguments, contender.word) == contender
    assert len({c.name for c in listed if c.word == "strom"}) == 6


def test_what_the_optimizer_cannot_run_is_left_out_and_refused_by_name():
    refused = refused_by(torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1, momentum=0.9))
    assert list(refused) == ["strom"]
    assert "strom" not in {c.word for c in contenders(4, 1000, ("none",), refused=refused)}
    with pytest.raises(ValueError, match="takes every step itself, as plain SGD"):
        contenders(4, 1000, ("none",), words=["strom"], refused=refused)
    assert not refused_by(torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1))


def test_the_largest_of_many_draws():
    assert expected_largest(1) == 0
    assert expected_largest(2) == pytest.approx(0.564, abs=0.03)
    assert expected_largest(1000) == pytest.approx(3.24, abs=0.05)
