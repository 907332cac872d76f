"""Codecs: ways to compress a vector. Each idea has its own file, or a folder with its CPU and GPU kernels."""

from shoal.codecs.by_layer import ByLayer
from shoal.codecs.e3m0.codec import E3M0
from shoal.codecs.factors import Factors
from shoal.codecs.halves.codec import BF16, FP16
from shoal.codecs.int8.codec import Int8
from shoal.codecs.low_rank import LowRank
from shoal.codecs.one_bit.codec import OneBit
from shoal.codecs.qsgd.codec import QSGD
from shoal.codecs.sparse.dgc import DGC
from shoal.codecs.sparse.random_k import RandomK
from shoal.codecs.sparse.sparse import Sparse
from shoal.codecs.sparse.threshold import Threshold
from shoal.codecs.sparse.top_k import TopK
from shoal.codecs.ternary.codec import Ternary
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
