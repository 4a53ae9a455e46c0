"""The release of kvkeep."""

__version__ = "0.1.0"
