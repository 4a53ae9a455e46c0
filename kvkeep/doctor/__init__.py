"""What this machine is to kvkeep: processor, kernels, threads, memory, libraries, a model."""
