"""Whether the kernels here are those of `make sanitize`, under which whole models take minutes."""

import os

SANITIZED = "ASAN_OPTIONS" in os.environ
