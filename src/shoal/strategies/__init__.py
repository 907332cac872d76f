"""One paper, one file: how workers are kept together. A file is imported when its strategy is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.vocabulary.strategy import Strategy

STRATEGIES: Catalogue[Strategy] = Catalogue(
    "strategy",
    {
        "single": "shoal.strategies.single:Single",
        "sync": "shoal.strategies.sync:Sync",
        "local": "shoal.strategies.local:Local",
        "post_local": "shoal.strategies.post_local:PostLocal",
        "bmuf": "shoal.strategies.bmuf:BMUF",
        "slowmo": "shoal.strategies.slowmo:SlowMo",
        "diloco": "shoal.strategies.diloco:DiLoCo",
        "streaming_diloco": "shoal.strategies.streaming_diloco:StreamingDiLoCo",
        "muloco": "shoal.strategies.muloco:MuLoCo",
        "sparse_loco": "shoal.strategies.sparse_loco:SparseLoCo",
        "demo": "shoal.strategies.decoupled_momentum:DecoupledMomentum",
        "ensemble": "shoal.strategies.ensemble:Ensemble",
        "sync_server": "shoal.strategies.sync_server:SyncServer",
        "hierarchical": "shoal.strategies.hierarchical:Hierarchical",
        "asgd": "shoal.strategies.asgd:ASGD",
        "staleness_aware": "shoal.strategies.staleness_aware:StalenessAware",
        "softsync": "shoal.strategies.softsync:SoftSync",
        "ssp": "shoal.strategies.ssp:SSP",
        "dcasgd": "shoal.strategies.dcasgd:DCASGD",
        "downpour": "shoal.strategies.downpour:Downpour",
        "async_diloco": "shoal.strategies.async_diloco:AsyncDiLoCo",
        "decoupled_diloco": "shoal.strategies.decoupled_diloco:DecoupledDiLoCo",
        "halos": "shoal.strategies.halos:HALoS",
        "sandblaster": "shoal.strategies.sandblaster:Sandblaster",
        "hogwild": "shoal.strategies.hogwild:Hogwild",
        "easgd": "shoal.strategies.easgd:EASGD",
        "eamsgd": "shoal.strategies.easgd:EAMSGD",
        "gossip": "shoal.strategies.gossip:Gossip",
        "gossipgrad": "shoal.strategies.gossipgrad:GossipGraD",
        "noloco": "shoal.strategies.noloco:NoLoCo",
        "dpsgd": "shoal.strategies.dpsgd:DPSGD",
        "sgp": "shoal.strategies.sgp:SGP",
        "adpsgd": "shoal.strategies.adpsgd:ADPSGD",
        "choco": "shoal.strategies.choco:CHOCO",
        "strom": "shoal.strategies.strom:Strom",
    },
    checks=("shoal.core.limits", "shoal.topologies"),
)


def __getattr__(name: str) -> Any:
    """`from shoal.strategies import BMUF` imports that file alone."""
    return STRATEGIES.class_called(name)
