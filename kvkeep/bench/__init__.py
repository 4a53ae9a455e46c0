"""Measurements that anyone can repeat: `python -m kvkeep.bench.<name>`."""
