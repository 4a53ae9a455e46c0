"""Models: specification, forward, weights, text, and where models come from."""
