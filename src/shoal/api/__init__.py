"""The public entry points: run(), attach() and shard(), minimize(), comm_hook()."""
