"""Diagnostics: processor, kernels, threads, memory, libraries, and the speed of a model."""
