"""What MPI calls the dtypes it can add."""

from __future__ import annotations

import torch
from mpi4py import MPI

MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}
"""The 16 bits of half precision are not among them."""
