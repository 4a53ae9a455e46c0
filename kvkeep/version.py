"""The release of kvkeep."""

__version__ = "0.2.0"
