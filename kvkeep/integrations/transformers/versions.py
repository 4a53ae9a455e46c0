"""Which versions of transformers kvkeep works with."""

import re

OLDEST, BELOW = (5, 16), (6, 0)


def require_version() -> None:
    """Raises ImportError, saying what to install, outside of the versions that are tested."""
    import transformers

    found = transformers.__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers < BELOW:
        wanted = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BELOW))}"
        raise ImportError(
            f"kvkeep works inside of transformers {wanted}; found {found}: "
            f'pip install "transformers{wanted}"'
        )
