"""One of two processes that exchange tensors on one GPU, for test_gpu_memory.py: prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from shoal.core.transport import LOST, Message
from shoal.launch.drive import drive
from shoal.transports.sockets import SocketTransport

PATIENCE = 60.0
ELEMENTS = 1_000_000


def main() -> None:
    path, rank, dies = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "dies"
    torch.zeros(1, device="cuda")
    store = dist.FileStore(path, 2)
    t = SocketTransport.connect(rank, 2, store, limit_bytes=8 * ELEMENTS, timeout=PATIENCE)
    found = []
    for number in range(4):
        sent = torch.full((ELEMENTS,), 10.0 * number + rank, device="cuda")
        drive(t.send(1 - rank, Message("vector", (sent, torch.arange(3, device="cuda")))))
        sent.zero_()  # the sender's own again
        got = drive(t.recv(PATIENCE))
        vector, numbers = got.parts
        right = bool((vector == 10.0 * number + 1 - rank).all()) and numbers.tolist() == [0, 1, 2]
        found.append({"right": right, "cuda": vector.is_cuda})
        del got, vector, numbers
    if dies and rank == 0:
        drive(t.send(1, Message("last", (torch.full((ELEMENTS,), 7.0, device="cuda"),))))
        time.sleep(1.0)
        os._exit(1)
    if dies:
        last = drive(t.recv(PATIENCE))
        assert drive(t.recv(PATIENCE)).tag == LOST
        found.append({"right": bool((last.body + 1 == 8).all()), "cuda": last.body.is_cuda})
        del last
    print(json.dumps(found), flush=True)
    drive(t.close())


if __name__ == "__main__":
    main()
