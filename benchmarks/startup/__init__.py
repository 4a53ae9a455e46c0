"""Programs that generate one token each, timed from outside; they import nothing of kvkeep."""
