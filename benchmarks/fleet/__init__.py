"""What a fleet costs and gives: measured with a few servers here, and simulated for many."""
