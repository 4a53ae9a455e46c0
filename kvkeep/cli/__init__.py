"""The command line: one file a command. Importing it does not import torch."""
