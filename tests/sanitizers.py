"""Whether `make sanitize` runs: whole models then take minutes."""

import os

SANITIZED = "ASAN_OPTIONS" in os.environ
