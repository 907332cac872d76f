"""What an algorithm does when nothing is said. A default that changes changes everybody's results."""

from dataclasses import asdict

import pytest

from shoal.strategies import STRATEGIES

DEFAULTS = {
    "single": {},
    "sync": {},
    "local": {
        "period": 16,
        "warmup": 0,
        "reset_momentum": True,
        "blocks": None,
        "penalty": None,
        "clip": 10.0,
        "overlap": 0,
    },
    "post_local": {"switch": 100, "period": 16, "reset_momentum": True},
    "bmuf": {
        "period": 50,
        "momentum": None,
        "rate": 1.0,
        "nesterov": True,
        "variant": "paper",
        "warmup": None,
        "reset_momentum": True,
        "blocks": None,
        "overlap": 0,
    },
    "diloco": {"period": 500, "rate": 0.7, "momentum": 0.9, "warmup": 0, "overlap": 0},
    "slowmo": {"period": 48, "momentum": 0.5, "rate": 1.0, "reset_momentum": True, "overlap": 0},
    "halos": {
        "groups": 2,
        "period": 8,
        "exchange": 32,
        "mixing": 0.25,
        "local_rate": 0.2,
        "local_momentum": 0.9,
        "local_buffer": 16,
        "rate": 0.15,
        "momentum": 0.5,
        "buffer": 2,
        "dynamic": True,
    },
    "decoupled_diloco": {
        "period": 100,
        "fragments": 4,
        "quorum": 1,
        "overlap": 5,
        "grace": 0.5,
        "mixing": 0.5,
        "rate": 0.7,
        "momentum": 0.9,
        "merge": "radial",
    },
    "demo": {"decay": 0.999, "kept": 32, "chunk": 64, "weight_decay": 0.0},
    "async_diloco": {
        "period": 50,
        "rate": 0.7,
        "momentum": 0.9,
        "buffer": None,
        "activation": 0.0,
        "dynamic": True,
        "grace": 0.0,
    },
    "muloco": {
        "period": 30,
        "rate": 0.9,
        "momentum": 0.8,
        "warmup": 0,
        "inner_momentum": 0.95,
        "nesterov": False,
        "weight_decay": 0.1,
        "scale": "spectral",
    },
    "noloco": {"period": 50, "rate": 0.7, "momentum": 0.5, "pull": None, "group": 2, "seed": 0},
    "sparse_loco": {
        "period": 15,
        "density": 0.03125,
        "chunk": 64,
        "values": "2bit",
        "decay": 0.95,
        "rate": 1.0,
        "merge": "touched",
    },
    "streaming_diloco": {
        "period": 100,
        "fragments": 4,
        "overlap": 5,
        "mixing": 0.5,
        "rate": 0.7,
        "momentum": 0.9,
        "warmup": 0,
        "eager": False,
    },
    "ensemble": {"all_data": False},
    "sync_server": {"backup": 0},
    "hierarchical": {"groups": 2, "collect": None},
    "asgd": {},
    "staleness_aware": {},
    "softsync": {"collect": None, "wait": False, "staleness_aware": True},
    "ssp": {"bound": 3},
    "dcasgd": {"strength": None, "adaptive": True, "decay": 0.95},
    "downpour": {
        "n_fetch": 1,
        "n_push": 1,
        "overlap": False,
        "optimizer": None,
        "rate": None,
        "warmup": None,
        "warm_start": 0,
        "momentum": 0.9,
        "eps": 1e-8,
        "fixed_shares": True,
    },
    "sandblaster": {
        "history": 10,
        "iterations": None,
        "portions": None,
        "push_every": 8,
        "l2": 0.0,
        "tolerance": 1e-5,
        "decrease": 1e-4,
        "curvature": 0.9,
        "lease": 60.0,
    },
    "hogwild": {},
    "easgd": {"rate": None, "period": 10, "synchronous": False, "order": "saved"},
    "eamsgd": {"rate": None, "period": 10, "synchronous": False, "order": "saved", "momentum": 0.9},
    "gossip": {"period": 1, "topology": "complete", "help": True},
    "gossipgrad": {"partners": "dissemination", "mode": "model", "shuffle": True, "seed": 0},
    "dpsgd": {"topology": "ring", "overlap": True},
    "sgp": {"topology": "one_peer", "overlap": 0},
    "adpsgd": {"topology": "complete", "help": True},
    "choco": {"topology": "ring", "rate": None},
    "strom": {"help": True},
}


def test_none_is_left_out():
    assert DEFAULTS.keys() == set(STRATEGIES)


@pytest.mark.parametrize("word", DEFAULTS)
def test_defaults(word):
    assert asdict(STRATEGIES.make(word)) == DEFAULTS[word]
