"""Comparison of kvkeep with its alternatives in one run: `python -m benchmarks.compare`."""
