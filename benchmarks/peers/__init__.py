"""Peers that kvkeep is compared with, behind one interface, each in its own process."""
