"""Saved sessions by name: in a folder with locks, or in an object store with leases."""
