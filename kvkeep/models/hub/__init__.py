"""Sources of models: the hub, the package index, GGUF files, and the local library."""
