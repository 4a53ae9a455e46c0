"""kvkeep beside what people would pick instead, in one run: `python -m benchmarks.compare`."""
