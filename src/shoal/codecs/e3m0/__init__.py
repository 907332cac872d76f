"""Four bits an element."""
