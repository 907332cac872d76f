"""The store that nodes ask through their agent: what one sets all see, and gloo can use it."""

import json
import threading
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe

import pytest
from torch import distributed as dist

from shoal.launch.relayed_store import RelayedStore, StoreValues


def answer(line: Connection, values: StoreValues) -> None:
    """What an agent and the launcher do, until the node hangs up."""
    with line:
        try:
            while True:
                line.send_bytes(json.dumps(values.answer(json.loads(line.recv_bytes()))).encode())
        except (EOFError, OSError):
            return


@pytest.fixture
def stores():
    """The stores of two nodes."""
    values, made, threads = StoreValues(), [], []
    lines = [Pipe() for _ in range(2)]
    for ours, theirs in lines:
        made.append(RelayedStore(ours))
        threads.append(threading.Thread(target=answer, args=(theirs, values)))
        threads[-1].start()
    yield made
    for ours, _ in lines:
        ours.close()
    for thread in threads:
        thread.join()


def test_what_one_node_sets_the_other_sees(stores):
    first, second = stores
    assert not second.check(["a"])
    first.set("a", "x")
    second.set("b", b"\x00\xff")
    assert second.check(["a", "b"]) and second.get("a") == b"x" and first.get("b") == b"\x00\xff"


def test_a_value_that_nobody_sets_is_not_waited_for_longer_than_asked(stores):
    with pytest.raises(RuntimeError, match=r"nobody set nothing within 0.01 s"):
        stores[0].wait(["nothing"], timedelta(seconds=0.01))


def test_torch_s_own_code_reads_it(stores):
    first, second = stores
    dist.PrefixStore("run", first).set("key", "value")
    assert dist.PrefixStore("run", second).get("key") == b"value"
    assert second.check(["run/key"])


def test_a_launcher_that_is_gone_is_an_error():
    ours, theirs = Pipe()
    theirs.close()
    with ours, pytest.raises(RuntimeError, match="the store is gone"):
        RelayedStore(ours).check(["a"])
