"""The session that a request targets, and the operation on it, from the method and path."""

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from kvkeep.chat.compaction_items import is_handle
from kvkeep.server.errors import ApiError
from kvkeep.server.limits import parse_json
from kvkeep.storage.sessions.interface import is_valid_name

# none: no session of the store. unknown: an invalid path below /v1/sessions/. events: an endless
# stream. snapshot: saves a labelled snapshot. revert: a write that reads another session, too.
# save: nothing to do, as every commit saves. stop: ends another request's answer. pins,
# release_pin: of all servers; the action is the pin.
TargetOperation = (
    Literal["none", "unknown", "list", "read", "events"]
    | Literal["pins", "release_pin"]
    | Literal["create", "fork", "snapshot", "write", "revert", "delete", "save", "stop"]
)
_SESSION_ROUTE = re.compile(r"/v1/sessions/([^/]+)(?:/([a-z]+))?")
_PIN_ROUTE = re.compile(r"/v1/prefix/pins/(pin-[0-9a-f]{16})")
_RESTORE_ROUTE = re.compile(r"/v1/snapshots/[^/]+/restore")
SESSIONS_PATH, PINS_PATH = "/v1/sessions", "/v1/prefix/pins"
# Sessions local to each server.
_RESERVED_NAMES = re.compile(r"(slot-\d+|resp_.*)", re.DOTALL)


@dataclass(frozen=True)
class SessionTarget:
    """The target of a request. name: the session's. action: the path's word after the name."""

    operation: TargetOperation
    name: str = ""
    action: str = ""


def session_target(method: str, path: str) -> SessionTarget:
    """Classify a request by its method and path."""
    if not path.isprintable():  # routes would accept a trailing newline
        return SessionTarget("unknown")
    if method == "POST" and (path == SESSIONS_PATH or _RESTORE_ROUTE.fullmatch(path)):
        return SessionTarget("create")
    if path == PINS_PATH and method == "GET":
        return SessionTarget("pins")
    if method == "DELETE" and (pin := _PIN_ROUTE.fullmatch(path)):
        return SessionTarget("release_pin", action=pin[1])
    if path == SESSIONS_PATH:
        return SessionTarget("list" if method == "GET" else "none")
    if method == "OPTIONS" or not path.startswith(f"{SESSIONS_PATH}/"):
        return SessionTarget("none")
    match = _SESSION_ROUTE.fullmatch(path)
    if match is None or not is_valid_name(match[1]):
        return SessionTarget("unknown")
    name, action = match[1], match[2] or ""
    operation: TargetOperation = "write"
    if method in ("GET", "HEAD"):
        operation = "events" if action == "events" else "read"
    elif action == "snapshot" or (
        action in ("fork", "revert", "save", "stop") and method == "POST"
    ):
        operation = cast(TargetOperation, action)
    elif method == "DELETE":  # nothing below a session can be deleted: the application refuses it
        operation = "none" if action else "delete"
    return SessionTarget(operation, name, action)


def require_new_name(name: object) -> str:
    """Check and return a new session's name. Raises ApiError if it is invalid or reserved."""
    if not isinstance(name, str) or not is_valid_name(name):
        raise ApiError(400, f"name: {name!r:.120} is not a valid session name", param="name")
    if _RESERVED_NAMES.fullmatch(name) or is_handle(name):
        message = f"name: {name!r} is reserved for slots, responses and compactions"
        raise ApiError(400, message, param="name")
    return name


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON body. Raises ApiError if it is not an object."""
    try:
        parsed = parse_json(body or b"{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return parsed
