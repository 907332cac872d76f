"""Keys by which nodes find each other: who is waited for, and who is not."""

import time

import torch.distributed as dist

from shoal.transports.rendezvous import await_keys

KEYS = {0: "here/0", 1: "here/1"}
PATIENCE = 60.0


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    store = dist.HashStore()
    store.set("here/0", "")
    assert await_keys(store, KEYS, PATIENCE, gone={1}) == {1: "here/1"}


def test_ranks_that_do_not_come_in_time_are_returned() -> None:
    assert await_keys(dist.HashStore(), KEYS, 0.0) == KEYS


def test_a_rank_that_publishes_its_key_and_leaves_at_once_has_come() -> None:
    gone: set[int] = set()
    store = dist.HashStore()

    class Late:
        """Rank 1 comes, and leaves, while we look for its key the first time."""

        def check(self, keys: list[str]) -> bool:
            found = store.check(keys)
            for key in KEYS.values():
                store.set(key, "")
            gone.add(1)
            return found

    assert await_keys(Late(), KEYS, PATIENCE, gone) == {}  # type: ignore[arg-type]


def test_a_rank_that_leaves_while_we_wait_is_waited_for_no_longer() -> None:
    gone: set[int] = set()

    class Empty:
        def check(self, keys: list[str]) -> bool:
            gone.update(KEYS)
            return False

    began = time.monotonic()
    assert await_keys(Empty(), KEYS, PATIENCE, gone) == KEYS  # type: ignore[arg-type]
    assert time.monotonic() - began < PATIENCE / 2
