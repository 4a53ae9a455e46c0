"""Performance of a fleet: measured with a few servers here, simulated for many."""
