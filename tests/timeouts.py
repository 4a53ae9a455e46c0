"""How long a test waits for another process: only to end one that hangs."""

PATIENCE = 600.0  # seconds
