"""HTTP features between the security checks and the routes: HEAD; compressed and large bodies."""

import io
import re
import zlib
from asyncio import to_thread
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kvkeep.server.errors import ApiError
from kvkeep.server.idempotency import read_body, replay
from kvkeep.server.limits import MAX_BODY_BYTES, MAX_VALUES, require_few_values
from kvkeep.server.security import too_large_error

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib's code for "detect the header"
_CHUNK_BYTES = 4096
_ZEROS = re.compile(rb"\0*")


class TransportMiddleware:
    """Answers HEAD as GET without a body, and decompresses request bodies.

    A body is decompressed up to `MAX_BODY_BYTES`; a larger one is rejected before it takes memory,
    and so is one whose JSON has more than `MAX_VALUES` values.
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        encoding = Headers(scope=scope).get("content-encoding", "identity").strip().lower()
        if encoding in ("", "identity") and not _may_have_many_values(scope):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:  # the client is gone
            return
        try:
            decompressed = await to_thread(_checked_body, body, encoding)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        message = {"type": "http.request", "body": decompressed}
        scope = _with_length(scope, len(decompressed))
        await self._app(scope, replay([message], receive), send)


def _may_have_many_values(scope: Scope) -> bool:
    """Whether a body is as large as one of too many values, or its length is unknown."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "0")  # checked by SecurityMiddleware
    return "transfer-encoding" in headers or int(length) > MAX_VALUES


def _checked_body(body: bytes, encoding: str) -> bytes:
    """Return a body, decompressed. Raises ApiError as `_decompress` and `require_few_values`."""
    if encoding not in ("", "identity"):
        body = _decompress(body, encoding)
    require_few_values(body)
    return body


def _decompress(body: bytes, encoding: str) -> bytes:
    """Decompress a body. Raises ApiError: 415 for the encoding, 400 for damaged data, 413."""
    if encoding not in _DECOMPRESSORS:
        known = ", ".join(_DECOMPRESSORS)
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported; use one of {known}")
    try:
        decompressed = _DECOMPRESSORS[encoding](body, MAX_BODY_BYTES + 1)
    except Exception as error:  # each library raises its own types
        raise ApiError(400, f"the request's body is not valid {encoding} data") from error
    if len(decompressed) > MAX_BODY_BYTES:
        raise too_large_error()
    return decompressed


def _decompress_zlib(body: bytes, max_bytes: int) -> bytes:
    """Decompress the members of a body, up to `max_bytes`. They may have zeros behind them."""
    result, offset = bytearray(), 0
    while offset < len(body) or offset == 0:
        decompressor = zlib.decompressobj(wbits=_GZIP_OR_ZLIB)
        while not decompressor.eof:
            # By chunks, since what is behind a member is copied.
            chunk = body[offset : offset + _CHUNK_BYTES]
            if not chunk:
                raise ValueError("the data ends early")
            result += decompressor.decompress(chunk, max_bytes - len(result))
            if len(result) == max_bytes:
                return bytes(result)
            offset += len(chunk) - len(decompressor.unused_data)
        padding = _ZEROS.match(body, offset)
        offset = padding.end() if padding else offset
    return bytes(result)


def _decompress_zstd(body: bytes, max_bytes: int) -> bytes:
    import zstandard  # only when a client uses it

    # A frame may ask for a window of any size, which takes as much memory.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
    with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        return reader.read(max_bytes)


_DECOMPRESSORS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _decompress_zlib,
    "deflate": _decompress_zlib,
    "zstd": _decompress_zstd,
}


def _with_length(scope: Scope, body_length: int) -> Scope:
    dropped = (b"content-encoding", b"content-length", b"transfer-encoding")
    headers = [header for header in scope["headers"] if header[0].lower() not in dropped]
    return {**scope, "headers": [*headers, (b"content-length", str(body_length).encode())]}


def _without_body(send: Send) -> Send:
    async def send_without_body(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_without_body
