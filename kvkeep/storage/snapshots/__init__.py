"""Snapshots of sessions: the file format, its checks, and model fingerprints."""
