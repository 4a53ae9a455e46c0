"""Prefix caches on disk and in an object store."""
