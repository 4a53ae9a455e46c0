"""What a session may be called, wherever it is kept."""

import re

from kvkeep.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name


def checked_name(name: str) -> str:
    """Raises InvalidArgument for a name that is not one."""
    if not is_name(name):
        raise InvalidArgument(
            "a session's name must be 1 to 100 letters, digits, '.', '_' and '-', beginning "
            f"with no '.' and without '..'; found {name!r}"
        )
    return name
