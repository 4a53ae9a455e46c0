"""The `kvkeep` command line. Importing it does not import torch."""
