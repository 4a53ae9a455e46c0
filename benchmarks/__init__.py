"""Measurements that anyone can repeat, from a clone: `python -m benchmarks.<name>`."""
