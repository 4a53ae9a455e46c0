"""How long a test waits for another process. No test is about speed: this ends one that hangs."""

PATIENCE = 600.0  # seconds
