"""Simulated users of a server that loses its process, disk, clock or network for a while."""
