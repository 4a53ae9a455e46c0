"""Notices about a request in its response's headers: ignored fields, warnings, prompt rules."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

IGNORED_HEADER, WARNING_HEADER = "X-Kvkeep-Ignored", "X-Kvkeep-Warning"
RULES_HEADER = "X-Kvkeep-Prompt-Rules"
_SCOPE_KEY = "notices"
_MAX_CHARACTERS = 1000  # of one header: proxies refuse responses with very long ones


@dataclass
class Notices:
    """The notices about one request so far. They are sent with the start of its response."""

    _ignored: dict[str, None] = field(default_factory=dict)  # in order, each once
    _warnings: dict[str, None] = field(default_factory=dict)
    _rules: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, scope: Scope) -> "Notices":
        """Return the notices about the request of an ASGI scope."""
        notices: Notices = scope.setdefault(_SCOPE_KEY, cls())
        return notices

    def ignore(self, *fields: str) -> None:
        """Name fields that would change the answer, and are ignored."""
        self._ignored |= dict.fromkeys(fields)

    def warn(self, *warnings: str) -> None:
        """Add warnings: sentences without the full stop."""
        self._warnings |= dict.fromkeys(warnings)

    def add_rules(self, *names: str) -> None:
        """Name the prompt rules that changed the prompt."""
        self._rules |= dict.fromkeys(names)

    @property
    def rules(self) -> list[str]:
        """The names of the prompt rules that changed the prompt."""
        return list(self._rules)

    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = (
            (IGNORED_HEADER, self._ignored, ", "),
            (WARNING_HEADER, self._warnings, "; "),
            (RULES_HEADER, self._rules, ", "),
        )
        return [
            (name.lower().encode(), _header_value(values, separator))
            for name, values, separator in lines
            if values
        ]


class NoticesMiddleware:
    """Adds the notices about each request to the headers of its response."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        notices = Notices.of(scope)

        async def send_with_notices(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *notices.headers()]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_with_notices)


def _header_value(values: Iterable[str], separator: str) -> bytes:
    """Join values. Clients chose some of them: only printable ASCII may be in a header."""
    text = separator.join(values)
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS - 4]} ..."
    return "".join(c if " " <= c <= "~" else "?" for c in text).strip().encode()
