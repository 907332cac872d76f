"""Puts this folder, and so harness.py, on the path of the tests in the folders below."""
