"""Codecs: ways to compress a vector. Each idea has its own file, or a folder with its CPU and GPU kernels.

A file is imported when its codec is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.catalogue import Catalogue

if TYPE_CHECKING:
    from shoal.core.codec import Codec

CODECS: Catalogue[Codec] = Catalogue(
    "codec",
    {
        "none": "shoal.core.codec:Identity",
        "fp16": "shoal.codecs.halves.codec:FP16",
        "bf16": "shoal.codecs.halves.codec:BF16",
        "int8": "shoal.codecs.int8.codec:Int8",
        "e3m0": "shoal.codecs.e3m0.codec:E3M0",
        "one_bit": "shoal.codecs.one_bit.codec:OneBit",
        "ternary": "shoal.codecs.ternary.codec:Ternary",
        "qsgd": "shoal.codecs.qsgd.codec:QSGD",
        "low_rank": "shoal.codecs.low_rank.codec:LowRank",
        "factors": "shoal.codecs.factors.codec:Factors",
        "sparse": "shoal.codecs.sparse.codec:Sparse",
        "top_k": "shoal.codecs.sparse.top_k:TopK",
        "random_k": "shoal.codecs.sparse.random_k:RandomK",
        "threshold": "shoal.codecs.sparse.threshold:Threshold",
        "dgc": "shoal.codecs.sparse.dgc:DGC",
        "by_layer": "shoal.codecs.by_layer:ByLayer",
    },
    checks=("shoal.core.limits",),
)


def __getattr__(name: str) -> Any:
    """`from shoal.codecs import TopK` imports that file alone."""
    return CODECS.class_called(name)
