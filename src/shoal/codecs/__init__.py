"""One idea, one file: ways to write a difference down shorter."""

from shoal.codecs.bf16 import BF16
from shoal.codecs.by_layer import ByLayer
from shoal.codecs.dgc import DGC
from shoal.codecs.e3m0 import E3M0
from shoal.codecs.factors import Factors
from shoal.codecs.fp16 import FP16
from shoal.codecs.int8 import Int8
from shoal.codecs.low_rank import LowRank
from shoal.codecs.one_bit import OneBit
from shoal.codecs.qsgd import QSGD
from shoal.codecs.random_k import RandomK
from shoal.codecs.sparse import Sparse
from shoal.codecs.ternary import Ternary
from shoal.codecs.threshold import Threshold
from shoal.codecs.top_k import TopK
from shoal.core.catalogue import Catalogue
from shoal.core.codec import Codec, Identity

CODECS: Catalogue[Codec] = Catalogue(
    "codec",
    {
        "none": Identity,
        "fp16": FP16,
        "bf16": BF16,
        "int8": Int8,
        "e3m0": E3M0,
        "one_bit": OneBit,
        "ternary": Ternary,
        "qsgd": QSGD,
        "low_rank": LowRank,
        "factors": Factors,
        "sparse": Sparse,
        "top_k": TopK,
        "random_k": RandomK,
        "threshold": Threshold,
        "dgc": DGC,
        "by_layer": ByLayer,
    },
)
