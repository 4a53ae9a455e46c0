"""What runs kvkeep in a process: the compute worker, signals, processor limits and memory."""
