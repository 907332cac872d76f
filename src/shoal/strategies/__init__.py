"""One paper, one file: how workers are kept together."""

from shoal.core.catalogue import Catalogue
from shoal.core.strategy import Strategy
from shoal.strategies.bmuf import BMUF
from shoal.strategies.diloco import DiLoCo
from shoal.strategies.downpour import Downpour
from shoal.strategies.easgd import EAMSGD, EASGD
from shoal.strategies.local import Local
from shoal.strategies.single import Single
from shoal.strategies.sync import Sync

STRATEGIES: Catalogue[Strategy] = Catalogue(
    "strategy",
    {
        "single": Single,
        "sync": Sync,
        "local": Local,
        "bmuf": BMUF,
        "diloco": DiLoCo,
        "downpour": Downpour,
        "easgd": EASGD,
        "eamsgd": EAMSGD,
    },
)
