"""A run from its plan to its result: processes, checkpoints, the journal, the learning curve."""
