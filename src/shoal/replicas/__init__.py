"""The model at one worker: a task's module or the user's own loop, and its share of the data."""
