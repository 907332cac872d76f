"""Profiling: how long a step, a message and a codec take on this machine."""
