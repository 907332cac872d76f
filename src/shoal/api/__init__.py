"""The public entry points: run(), attach(), epochs() and shard(), minimize(), comm_hook()."""
