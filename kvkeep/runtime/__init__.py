"""The process that kvkeep runs in: compute worker, signals, processor limits and memory."""
