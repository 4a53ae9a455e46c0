"""The formats in which models write answers, a file for each family of models."""
