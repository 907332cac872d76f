"""One paper, one file: how workers are kept together."""

from shoal.core.catalogue import Catalogue
from shoal.strategies.adpsgd import ADPSGD
from shoal.strategies.asgd import ASGD
from shoal.strategies.bmuf import BMUF
from shoal.strategies.choco import CHOCO
from shoal.strategies.dcasgd import DCASGD
from shoal.strategies.diloco import DiLoCo
from shoal.strategies.downpour import Downpour
from shoal.strategies.dpsgd import DPSGD
from shoal.strategies.easgd import EAMSGD, EASGD
from shoal.strategies.ensemble import Ensemble
from shoal.strategies.gossip import Gossip
from shoal.strategies.gossipgrad import GossipGraD
from shoal.strategies.hierarchical import Hierarchical
from shoal.strategies.hogwild import Hogwild
from shoal.strategies.local import Local
from shoal.strategies.post_local import PostLocal
from shoal.strategies.sgp import SGP
from shoal.strategies.single import Single
from shoal.strategies.slowmo import SlowMo
from shoal.strategies.softsync import SoftSync
from shoal.strategies.ssp import SSP
from shoal.strategies.staleness_aware import StalenessAware
from shoal.strategies.streaming_diloco import StreamingDiLoCo
from shoal.strategies.strom import Strom
from shoal.strategies.sync import Sync
from shoal.strategies.sync_server import SyncServer
from shoal.vocabulary.strategy import Strategy

STRATEGIES: Catalogue[Strategy] = Catalogue(
    "strategy",
    {
        "single": Single,
        "sync": Sync,
        "local": Local,
        "post_local": PostLocal,
        "bmuf": BMUF,
        "slowmo": SlowMo,
        "diloco": DiLoCo,
        "streaming_diloco": StreamingDiLoCo,
        "ensemble": Ensemble,
        "sync_server": SyncServer,
        "hierarchical": Hierarchical,
        "asgd": ASGD,
        "staleness_aware": StalenessAware,
        "softsync": SoftSync,
        "ssp": SSP,
        "dcasgd": DCASGD,
        "downpour": Downpour,
        "hogwild": Hogwild,
        "easgd": EASGD,
        "eamsgd": EAMSGD,
        "gossip": Gossip,
        "gossipgrad": GossipGraD,
        "dpsgd": DPSGD,
        "sgp": SGP,
        "adpsgd": ADPSGD,
        "choco": CHOCO,
        "strom": Strom,
    },
)
