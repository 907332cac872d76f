"""One idea, one file: ways to compress a vector. A file is imported when its codec is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.core.codec import Codec

CODECS: Catalogue[Codec] = Catalogue(
    "codec",
    {
        "none": "shoal.core.codec:Identity",
        "fp16": "shoal.codecs.fp16:FP16",
        "bf16": "shoal.codecs.bf16:BF16",
        "int8": "shoal.codecs.int8:Int8",
        "e3m0": "shoal.codecs.e3m0:E3M0",
        "one_bit": "shoal.codecs.one_bit:OneBit",
        "ternary": "shoal.codecs.ternary:Ternary",
        "qsgd": "shoal.codecs.qsgd:QSGD",
        "low_rank": "shoal.codecs.low_rank:LowRank",
        "factors": "shoal.codecs.factors:Factors",
        "sparse": "shoal.codecs.sparse:Sparse",
        "top_k": "shoal.codecs.top_k:TopK",
        "random_k": "shoal.codecs.random_k:RandomK",
        "threshold": "shoal.codecs.threshold:Threshold",
        "dgc": "shoal.codecs.dgc:DGC",
        "by_layer": "shoal.codecs.by_layer:ByLayer",
    },
    checks=("shoal.core.limits",),
)


def __getattr__(name: str) -> Any:
    """`from shoal.codecs import TopK` imports that file alone."""
    return CODECS.class_called(name)
