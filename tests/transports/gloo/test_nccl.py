"""Sums among GPUs by NCCL: on one GPU what can be seen there, between two where there are two."""

import pytest
import torch
import torch.distributed as dist

from shoal.transports.gloo.all_reduce import GlooAllReduce, StoreSchedule
from shoal.transports.gloo.nccl import finish_on_gpu, join_gpus, leave_gpus

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@needs_gpu
def test_a_group_of_one_gpu_sums():
    group = join_gpus(dist.HashStore(), 0, range(1), torch.device("cuda", 0), 10.0, set())
    v = torch.arange(5.0, device="cuda")
    finish_on_gpu([group.allreduce([v])], lambda: False)
    assert v.tolist() == [0, 1, 2, 3, 4]
    leave_gpus(group)


@needs_gpu
def test_two_workers_on_one_gpu_sum_in_host_memory():
    store = dist.HashStore()
    store.set("shoal/gpu/1", str(torch.cuda.get_device_properties(0).uuid))  # as the other would
    assert join_gpus(store, 0, range(2), torch.device("cuda", 0), 10.0, set()) is None


class Undone:
    """A sum that is never done."""

    def is_completed(self):
        return False


def test_a_sum_that_is_never_done_is_given_up():
    looks = iter([False, False, True])
    with pytest.raises(RuntimeError, match="was not done in time"):
        finish_on_gpu([Undone()], lambda: next(looks))


def test_what_lies_in_host_memory_is_summed_by_gloo():
    gloo = GlooAllReduce(None, StoreSchedule(0, range(2), set(), dist.HashStore()), set())
    v = torch.ones(3)
    assert gloo.staged(v).data_ptr() == v.data_ptr()
