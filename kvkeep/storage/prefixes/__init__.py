"""Prefix caches: in a folder of this machine, or in a shared object store."""
