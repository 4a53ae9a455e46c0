"""C++ kernels for the slowest parts of a forward pass on CPUs: decode steps and attention.

`setup.py` builds `src/` once for each instruction set if it finds a compiler;
`instruction_sets.py` selects the best set that the processor runs. Without kernels, or with
`KVKEEP_COMPILED=0`, torch computes everything; it is the reference that they are tested against.
"""
