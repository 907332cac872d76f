"""Launching: starts the processes of a run, connects their nodes, and steers them until they end."""
