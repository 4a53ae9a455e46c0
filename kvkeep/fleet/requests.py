"""Which session a request is about, and what it does to it."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.server.problems import Problem
from kvkeep.store.session_names import is_name

# none: about no session that is kept in the store. begin: makes one. fork: makes one of another.
# restore: makes one of a snapshot. read: changes nothing. save: asks for what is done anyway.
Kind = Literal["none", "list", "begin", "fork", "read", "write", "delete", "save"]
_SESSION = re.compile(r"/v1/sessions/([^/]+)(?:/([a-z]+))?")
_RESTORE = re.compile(r"/v1/snapshots/[^/]+/restore")
_READING = frozenset(("snapshot",))  # by POST, and leaves the session as it is
DRAWING = frozenset(("generate", "turns"))  # may draw tokens by chance


@dataclass(frozen=True)
class About:
    """kind: see `Kind`. name: of the session. action: the last word of the path."""

    kind: Kind
    name: str = ""
    action: str = ""


def about(method: str, path: str) -> About:
    """Of a request, by its first line."""
    if path == "/v1/sessions":
        return About("begin" if method == "POST" else "list" if method == "GET" else "none")
    if _RESTORE.fullmatch(path) and method == "POST":
        return About("begin")
    found = _SESSION.fullmatch(path)
    if found is None or not is_name(found[1]):
        return About("none")
    name, action = found[1], found[2] or ""
    if method in ("GET", "HEAD") or (method == "POST" and action in _READING):
        return About("read", name, action)
    if method == "DELETE":
        return About("delete", name)
    if action in ("fork", "save") and method == "POST":
        return About("fork" if action == "fork" else "save", name, action)
    return About("write", name, action)


def fields_of(body: bytes) -> dict[str, Any]:
    """Of a JSON body. Raises Problem for what is no object."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object")
    return found
