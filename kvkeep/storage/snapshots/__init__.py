"""Snapshots: the file format, its checks, and model fingerprints."""
