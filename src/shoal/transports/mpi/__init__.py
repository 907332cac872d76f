"""The ranks of an MPI job. Importing this package starts MPI; from then on a failing process ends the job.

transport   MpiTransport: messages                     windows  one-sided access to a vector
all_reduce  MPI's all-reduce, with errors that name the missing worker
library     mpi4py, its datatypes, and waiting without a busy core
"""

from shoal.transports.mpi.transport import MpiTransport

__all__ = ["MpiTransport"]
