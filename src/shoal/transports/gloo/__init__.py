"""The gloo backend of torch.distributed: messages, and all-reduce on CPUs or (by NCCL) GPUs.

transport      GlooTransport: process groups and messages
all_reduce     gloo's all-reduce, with errors that name the missing worker
nccl           all-reduce between GPUs
elastic        all-reduce where workers come and go
signs_of_life  who is silent for too long is lost
"""

from shoal.transports.gloo.elastic import ElasticGloo
from shoal.transports.gloo.transport import GlooTransport

__all__ = ["ElasticGloo", "GlooTransport"]
