"""Where models come from: hub, package index, GGUF files, and the local library."""
