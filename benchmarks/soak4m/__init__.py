"""Millions of tokens of real text through bounded sessions that are killed and restored."""
