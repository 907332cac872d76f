"""A run from its plan to its result: processes, evaluation, the learning curve."""
