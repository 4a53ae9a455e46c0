"""The chat in a session of a server."""
