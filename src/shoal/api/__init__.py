"""The front doors: run(), attach() and shard(), minimize(), comm_hook()."""
