"""Weights: tensors, checkpoints, packed matrices and their files."""
