"""Which session a request is about, and what it does to it."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.server.errors import ApiError
from kvkeep.storage.sessions.names import is_name

# none: about no session that is kept in the store. begin: makes one. fork: makes one of another.
# read: changes nothing. label: writes what it is elsewhere. watch: is told of it, for long. save:
# asks for what is done anyway. unknown: is like a session's, and none.
Kind = Literal[
    "none",
    "list",
    "begin",
    "fork",
    "read",
    "label",
    "watch",
    "write",
    "delete",
    "save",
    "unknown",
]
_SESSION = re.compile(r"/v1/sessions/([^/]+)(?:/([a-z]+))?")
_RESTORE = re.compile(r"/v1/snapshots/[^/]+/restore")
_PLACE = "/v1/sessions"
_OWN = re.compile(r"(slot-\d+|resp_.*)", re.DOTALL)  # of each server, as other APIs name them
DRAWING = frozenset(("generate", "turns"))  # may draw tokens by chance


@dataclass(frozen=True)
class About:
    """kind: see `Kind`. name: of the session. action: the last word of the path."""

    kind: Kind
    name: str = ""
    action: str = ""


def about(method: str, path: str) -> About:
    """Of a request, by its first line."""
    if not path.isprintable():  # routes take more for the end of a path than they say
        return About("unknown")
    if path == _PLACE:
        return About("begin" if method == "POST" else "list" if method == "GET" else "none")
    if _RESTORE.fullmatch(path) and method == "POST":
        return About("begin")
    if method == "OPTIONS" or not path.startswith(f"{_PLACE}/"):
        return About("none")
    found = _SESSION.fullmatch(path)
    if found is None or not is_name(found[1]):
        return About("unknown")
    name, action = found[1], found[2] or ""
    if method in ("GET", "HEAD"):
        return About("watch" if action == "events" else "read", name, action)
    if action == "snapshot":
        return About("label", name, action)
    if method == "DELETE":
        return About("delete", name)
    if action in ("fork", "save") and method == "POST":
        return About("fork" if action == "fork" else "save", name, action)
    return About("write", name, action)


def checked_new(name: object) -> str:
    """A name for a session that is to be in the store. Raises ApiError."""
    if not isinstance(name, str) or not is_name(name):
        raise ApiError(400, f"name: {name!r:.120} is no name of a session", param="name")
    if _OWN.fullmatch(name):
        raise ApiError(400, f"name: {name!r} is kept for slots and responses", param="name")
    return name


def fields_of(body: bytes) -> dict[str, Any]:
    """Of a JSON body. Raises ApiError for what is no object."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    return found
