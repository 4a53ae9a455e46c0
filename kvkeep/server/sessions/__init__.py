"""The session API: feed, generate, edit, fork, save and inspect sessions over HTTP."""
