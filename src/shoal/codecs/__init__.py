"""One idea, one file: ways to write a difference down shorter."""

from shoal.codecs.bf16 import BF16
from shoal.codecs.fp16 import FP16
from shoal.core.catalogue import Catalogue
from shoal.core.codec import Codec, Identity

CODECS: Catalogue[Codec] = Catalogue("codec", {"none": Identity, "fp16": FP16, "bf16": BF16})
