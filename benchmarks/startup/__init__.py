"""Whole programs of one token each, timed from the outside; they import nothing of kvkeep."""
