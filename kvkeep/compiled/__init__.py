"""Kernels in C++ for what takes most of the time on a CPU: the one-row step, and attention.

`src/` is built with the package where a compiler is found (`setup.py`), once for each instruction
set; `instruction_sets.py` takes the best that the processor has. Everything goes by torch without
them, which is the reference that they are tested against; `KVKEEP_COMPILED=0` switches them off.
"""
