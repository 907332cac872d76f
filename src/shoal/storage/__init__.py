"""What outlives a process: checkpoints of a run, and the journal of a server."""
