"""One byte an element."""
